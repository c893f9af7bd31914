"""`flwr run` on a stock SuperLink with two SuperNodes, in processes on loopback; none of them outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.flower.deployment import of_kind
from engines.flower.processes import free_port, session_members
from fedmtl.config.file import dump_config
from fedmtl.deploy.flower_project import write_project
from fedmtl.engines.flower.audit import verify
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")]

# A process of Flower's takes seconds to start, on a busy machine half a minute; every message starts one.
LONG = 600.0
TASKS = {"a": "sentiment", "b": "sentiment,paraphrase"}


@dataclass
class Federation:
    """A SuperLink and its SuperNodes, each with all that it starts in a session."""

    folder: Path
    port: int = field(default_factory=free_port)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        home = self.folder / "home"
        home.mkdir()
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent))),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.start("link", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
                   "--disable-runtime-dependency-installation")  # fmt: skip

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        self.started.append(process)
        return process

    def node(self, name: str) -> subprocess.Popen[bytes]:
        config = f'client="{name}" tasks="{TASKS[name]}" device="cpu" folder="{self.folder / name}"'
        return self.start(name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
                          "--port", str(free_port()), "--node-config", config)  # fmt: skip

    def run(self, name: str) -> RunFolder:
        self.wait(lambda: "Uvicorn running" in self.log("link"))
        submitted = self.start("run", "flwr", "run", "app", "here", "--run-config", f'name="{name}"')
        assert submitted.wait(LONG) == 0, self.logs()
        return RunFolder(self.folder / "runs" / name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in
                         self.folder.glob("*.log"))  # fmt: skip

    def wait(self, is_so: Any) -> None:
        end = time.monotonic() + LONG
        while not is_so():
            assert time.monotonic() < end, self.logs()
            assert "raised an exception" not in self.log("link"), self.logs()
            time.sleep(0.2)

    def finished(self, run: RunFolder) -> str:
        self.wait(lambda: run.events.exists() and '"event": "end"' in run.events.read_text())
        (end,) = of_kind(run, "end")
        assert end["status"] == "done"
        sha: str = end["weights_sha256"]
        return sha

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        for process in processes:
            for pid in session_members(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("stock"))
    try:
        yield made
    finally:
        made.end(*made.started)
        assert [pid for process in made.started for pid in session_members(process.pid)] == []


@pytest.fixture
def alone(federation, make_config) -> str:
    """The weights of the same config on one machine."""
    clients = "clients={a: {tasks: [sentiment]}, b: {tasks: [sentiment, paraphrase]}}"
    config = make_config(clients, "training.num_rounds=2", "evaluation.every=2", f"output={federation.folder / 'runs'}",
                         "federation.join_timeout=600")  # fmt: skip
    tasks = {name: config.tasks[name] for name in ("sentiment", "paraphrase")}
    config = config.model_copy(update={"tasks": tasks})
    given = federation.folder / "given.yaml"
    given.write_text(dump_config(config))
    if not (federation.folder / "app").exists():
        write_project(federation.folder / "app", given)
    (end,) = of_kind(start_run(config, "alone"), "end")
    sha: str = end["weights_sha256"]
    return sha


def test_flwr_run_gives_the_weights_of_one_machine(federation, alone):
    nodes = [federation.node("a"), federation.node("b")]
    run = federation.run("stock")
    try:
        assert federation.finished(run) == alone
        assert of_kind(run, "failure") == []
        # A hello and two jobs at each, every message recorded with its answer.
        found = [verify(federation.folder / name) for name in TASKS]
        assert [(each.lines, each.broken) for each in found] == [(6, None), (6, None)]
    finally:
        federation.end(*nodes)


def test_a_supernode_that_is_killed_and_started_again_does_its_job(federation, alone):
    nodes = [federation.node("a"), federation.node("b")]
    run = federation.run("killed")
    federation.wait(lambda: "ROUND 2" in federation.log("a").rpartition("Starting Flower SuperNode")[2])
    federation.end(nodes[0])
    nodes.append(federation.node("a"))
    try:
        assert federation.finished(run) == alone
        assert of_kind(run, "failure") == []
        assert len({event["round"] for event in of_kind(run, "update") if event["client"] == "a"}) == 2
    finally:
        federation.end(*nodes)
