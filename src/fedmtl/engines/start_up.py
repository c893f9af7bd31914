"""How many worker processes a run gets, and what they import before they are forked, so that they share it.

Nothing here loads a numeric library: it is called before any is there.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedmtl.config import ComputeConfig, Config
from fedmtl.model.encoder_files import holds_bert_values

GPU = Path("/dev/nvidiactl")
ENGINE = "fedmtl.engines.local"
# Other kinds of encoders import most of it too.
ENCODER_CODE = "transformers.models.bert.modeling_bert"
# Its import takes seconds.
LORA_CODE = "peft"


def num_workers(compute: ComputeConfig, device: str, num_clients: int) -> int:
    """As the config says; else one per core, none where a GPU computes or clients train at once. 0 is this process."""
    if compute.workers is not None:
        return compute.workers
    if device != "cpu" or compute.stack:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, max(num_clients, 2)))


def expects_workers(compute: ComputeConfig) -> bool:
    """Whether there will be workers, as far as is known before a device was tried."""
    device = ("cuda" if GPU.exists() else "cpu") if compute.device == "auto" else compute.device
    return num_workers(compute, device, num_clients=2) > 0


def worker_imports(config: Config) -> list[str]:
    """The engine, and transformers' code for models where values alone will not do."""
    values_only = config.compute.encoder != "plain" and holds_bert_values(config.model)
    lora = [] if config.model.lora is None else [LORA_CODE]
    return [ENGINE] if values_only else [ENGINE, ENCODER_CODE, *lora]
