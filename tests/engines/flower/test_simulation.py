"""Flower's simulation gives the weights of our own workers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.flower.deployment import of_kind
from fedmtl.config.file import dump_config
from fedmtl.experiment.run import start_run
from fedmtl.runs import RunFolder


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the extra `simulation`)")
def test_flowers_simulation_gives_the_same_weights(make_config, tmp_path):
    config = make_config("federation.clients_per_task=1", "compute.workers=2")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    alone = start_run(config, "alone")
    # In a process of its own: Ray leaves threads and sockets to the end of one.
    command = [sys.executable, "-m", "fedmtl", "run", "run.yaml", "--engine", "flower", "--name", "simulated"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    simulated = RunFolder(Path(config.output) / "simulated")
    digests = {of_kind(run, "end")[0]["weights_sha256"] for run in (alone, simulated)}
    assert len(digests) == 1
    assert [event["client"] for event in of_kind(simulated, "update")] == [
        event["client"] for event in of_kind(alone, "update")
    ]
