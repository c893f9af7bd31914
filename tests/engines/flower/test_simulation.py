"""Flower's simulation gives the weights of our own workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.flower.deployment import of_kind
from fedmtl.config.file import dump_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the extra `simulation`)"),
]


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


def busy_actors() -> list[int]:
    """Ray's processes that have a job just now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"ray::ClientAppActor.run" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_job_whose_actor_was_killed_is_done_by_another(make_config, tmp_path):
    config = make_config("federation.clients_per_task=1", "compute.workers=2", "training.local_epochs=60")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    alone = start_run(config, "alone")
    command = [sys.executable, "-m", "fedmtl", "run", "run.yaml", "--engine", "flower", "--name", "simulated"]
    simulated = RunFolder(Path(config.output) / "simulated")
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        end = time.monotonic() + 120
        while not (simulated.results.exists() and busy_actors()):
            assert time.monotonic() < end
            time.sleep(0.02)
        # In the first round every actor still opens its model.
        os.kill(busy_actors()[0], signal.SIGKILL)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
    assert of_kind(simulated, "failure") == []
    assert of_kind(simulated, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
