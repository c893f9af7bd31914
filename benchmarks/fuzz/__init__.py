"""Mutated inputs for every decoder and reader: `python -m fuzz --help`, or `make fuzz`."""

import os

# Before torch is loaded: every process is one core's, and none looks for anything on the network.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
