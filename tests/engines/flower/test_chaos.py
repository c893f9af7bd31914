"""Ten rounds in each of which somebody is killed: what was accepted is all that matters, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from engines.flower.deployment import make_certs, of_kind
from engines.flower.processes import Programs, free_port
from fedmtl.config import Config
from fedmtl.config.file import dump_config, load_config
from fedmtl.engines.local import LocalEngine
from fedmtl.experiment.events import opening_events
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.experiment.run import Log, drive
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, State, Update
from fedmtl.runs.folder import RunFolder, create_run, write_atomic
from small_config import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")]

SITES = {f"{task}_client": task for task in ("sentiment", "paraphrase", "similarity")}
ROUNDS = 10
# Who is killed after this round comes back when the next is over.
LATE_AFTER = 0


class Restricted:
    """An engine whose clients answer only in the rounds they are said to."""

    def __init__(self, engine: LocalEngine, contributions: Mapping[int, set[str]]) -> None:
        self._engine, self._contributions = engine, contributions

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        return self._engine.clients()

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        left_out: list[Failure] = []

        def wanted() -> Iterator[Job]:
            for job in jobs:
                if job.client in self._contributions[job.round]:
                    yield job
                else:
                    left_out.append(Failure(job.round, job.client, "left out"))

        yield from self._engine.run(wanted(), deadline)
        yield from left_out

    def predict(self, state: State, batch_size: int):
        return self._engine.predict(state, batch_size)

    def close(self) -> None:
        self._engine.close()


def restricted_run(config: Config, contributions: Mapping[int, set[str]]) -> RunFolder:
    prepared = prepare(config)
    run = create_run(Path(config.output), "calm")
    write_atomic(run.config, dump_config(config).encode())
    log = Log(run, lambda event: None, prepared.config)
    for event in opening_events(prepared):
        log(event)
    return drive(prepared, prepared.state, run, log, lambda: Restricted(open_engine(prepared, run), contributions))


def last_round(run: RunFolder) -> int:
    if not run.events.exists():
        return -1
    lines = [line for line in run.events.read_text().split("\n") if '"event": "round"' in line]
    try:
        return max((json.loads(line)["round"] for line in lines), default=-1)
    except ValueError:
        return -1


def test_kills_cost_contributions_and_nothing_else(tmp_path):
    # Two hundred passes make a round longer than it takes to start a process.
    overrides = [*SMALL, "federation.clients_per_task=1", f"training.num_rounds={ROUNDS}", "training.local_epochs=200",
                 "federation.round_timeout=25", "compute.workers=1", f"output={tmp_path / 'runs'}"]  # fmt: skip
    config = load_config(None, overrides)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    make_certs(tmp_path / "certs", {name: [task] for name, task in SITES.items()})
    port = free_port()
    programs = Programs(tmp_path)

    def start(name: str):
        if name == "server":
            is_new = not (tmp_path / "runs/chaos").exists()
            told = ("--config", "run.yaml", "--listen", f"127.0.0.1:{port}", "--certs", "certs", "--name", "chaos")
            return programs.start(name, "server", *(told if is_new else ("--resume", str(tmp_path / "runs/chaos"))))
        keys = ("--ca", "certs/ca.crt", "--key", f"certs/sites/{name}.key")
        server = f"127.0.0.1:{port}"
        return programs.start(name, "client", "--client-id", name, "--tasks", SITES[name], "--server", server, *keys)

    chance = random.Random(0)
    run = RunFolder(tmp_path / "runs/chaos")
    try:
        running = {name: start(name) for name in ("server", *SITES)}
        victims = []
        end = time.monotonic() + 900
        for number in range(ROUNDS):
            while last_round(run) < number:
                assert time.monotonic() < end, running["server"].text()
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 0.5))
            away = [name for name in SITES if "connected to the server" not in running[name].text()]
            # One site at a time: without any answer a run cannot go on.
            victim = chance.choice(["server", *(away or SITES)])
            victims.append(victim)
            running[victim].kill()
            # Most come back in time to be asked again; one only when its round is over.
            while number == LATE_AFTER and victim != "server" and last_round(run) == number:
                time.sleep(0.1)
            running[victim] = start(victim)
        assert running["server"].wait(300) == 0, running["server"].text()
        for name in SITES:
            # One that was away when the run ended goes on looking for its server.
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[name].process.wait(15)
            if running[name].process.poll() is None:
                running[name].process.terminate()
            assert running[name].wait(30) in (0, 128 + signal.SIGTERM), running[name].text()
        assert programs.left() == []
    finally:
        programs.end()
    assert {"server"} < set(victims), "the seed strikes the server and sites"
    assert len(victims) == ROUNDS
    missed = [event["round"] for event in of_kind(run, "failure") if "no answer within" in event["reason"]]
    assert missed, "somebody came back late"
    contributions = {number: set() for number in range(1, ROUNDS + 1)}
    for event in of_kind(run, "update"):
        contributions[event["round"]].add(event["client"])
    # Nobody is late in it, however busy the machine is.
    calm_settings = [*overrides, "compute.workers=2", "federation.round_timeout=900"]
    calm = restricted_run(load_config(None, calm_settings), contributions)
    assert {event["reason"] for event in of_kind(calm, "failure")} <= {"left out"}
    assert of_kind(run, "end")[0]["weights_sha256"] == of_kind(calm, "end")[0]["weights_sha256"]
    assert [event["round"] for event in of_kind(run, "round")] == list(range(ROUNDS + 1))
