"""The contestants: how each is started, and how its run is read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fedmtl.runs.event_lines import Event, first_of
from fedmtl.runs.events import PlanEvent, RoundEvent, UpdateEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from simulator.commands import Outcome, run
from simulator.contestants.telling import MARK
from simulator.environments import FLOWER, PFL, TRAINER, Environment

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """What is run: a workload folder, a population, how many rounds are counted, and the interpreter to run it with."""

    workload: Path
    clients: int
    rounds: int
    python: Path


@dataclass(frozen=True)
class Measured:
    """One run. `seconds` are those of the rounds after the first; megabytes are per client and round, both ways.

    Start-up is the time from the command to the first batch of the first round: some begin a round before anybody
    can work on it. For fedmtl it is the end of round 0, with workers up and waiting.
    """

    seconds: tuple[float, ...]
    begun: float
    start_up: float
    first_done: float
    peak_mb: float
    samples: int
    parameters: int
    processes: int
    others: float
    megabytes: float | None = None

    @property
    def round(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class System:
    """`variants` are tried in the first repeat; the fastest one goes on."""

    name: str
    words: str
    variants: Mapping[str, Callable[[Case], Measured]]
    environment: Environment | None = None


def cores() -> int:
    return len(os.sched_getaffinity(0))


def threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def run_fedmtl(case: Case, settings: Sequence[str] = (), config: Path | None = None) -> Measured:
    """`fedmtl run` as a user calls it; one round more, since the last is evaluated and not counted."""
    config = config or case.workload / f"clients-{case.clients}" / "config.yaml"
    with tempfile.TemporaryDirectory(prefix="fedmtl-bench-") as output:
        outcome, events = call_fedmtl(case.python, config, output, case.rounds + 1, settings)
    steady = [event for event in events if isinstance(event, RoundEvent) and 1 < event.round <= case.rounds]
    updates = [event for event in events if isinstance(event, UpdateEvent) and event.round == 2]
    samples = sum(task.examples for update in updates for task in update.tasks.values())
    traffic = steady[0].bytes_up + steady[0].bytes_down
    return Measured(
        seconds=tuple(event.seconds for event in steady),
        begun=_time_of(outcome, "  after round 0:"),
        start_up=_time_of(outcome, "  after round 0:"),
        first_done=_time_of(outcome, "  after round 1:"),
        peak_mb=outcome.peak_mb,
        samples=samples,
        parameters=first_of(events, PlanEvent).total,
        processes=outcome.processes,
        others=outcome.others,
        megabytes=traffic / max(1, steady[0].clients) / 1e6,
    )


def call_fedmtl(
    python: Path, config: Path, output: str, rounds: int, settings: Sequence[str] = ()
) -> tuple[Outcome, list[Event]]:
    """Run a config, and read the events it left."""
    sets = [f"output={output}", f"training.num_rounds={rounds}", *settings]
    command = [str(python), "-m", "fedmtl", "run", str(config), "--name", "bench", "--verbose"]
    for setting in sets:
        command += ["--set", setting]
    outcome = run(command, {"PYTHONPATH": str(ROOT / "src")})
    return outcome, read_events(RunFolder(Path(output) / "bench"))


def contestant(module: str, options: Sequence[str], num_threads: int) -> Callable[[Case], Measured]:
    """A module of `contestants` with these options."""

    def start(case: Case) -> Measured:
        return read_measured(case, run([str(case.python), *_arguments(module, case, options)], _env(num_threads)))

    return start


def torchrun(module: str, options: Sequence[str]) -> Callable[[Case], Measured]:
    """The same under torchrun, one process of one thread per core, on loopback."""

    def start(case: Case) -> Measured:
        launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launch += ["--nproc-per-node", str(cores()), *_arguments(module, case, options)]
        return read_measured(case, run([str(case.python), *launch], _env(1)))

    return start


def read_measured(case: Case, outcome: Outcome) -> Measured:
    """Read what a contestant reports on its marked lines."""
    lines = [(at, json.loads(text[len(MARK) :])) for at, text in outcome.lines if text.startswith(MARK)]
    rounds = [(at, fields) for at, fields in lines if fields["what"] == "round"]
    steady = [fields for _, fields in rounds[1:]]
    megabytes = steady[0]["megabytes"]
    begun = next(at for at, fields in lines if fields["what"] == "begin")
    return Measured(
        seconds=tuple(fields["seconds"] for fields in steady),
        begun=begun,
        start_up=begun if outcome.first_batch is None else outcome.first_batch,
        first_done=rounds[0][0],
        peak_mb=outcome.peak_mb,
        samples=steady[0]["samples"],
        parameters=next(fields["parameters"] for _, fields in lines if fields["what"] == "model"),
        processes=outcome.processes,
        others=outcome.others,
        megabytes=None if megabytes is None else megabytes / case.clients,
    )


def _arguments(module: str, case: Case, options: Sequence[str]) -> list[str]:
    shared = ["--workload", str(case.workload), "--clients", str(case.clients), "--rounds", str(case.rounds)]
    return ["-m", f"simulator.contestants.{module}", *shared, *options]


def _env(num_threads: int) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "benchmarks"), **threads(num_threads)}


def _time_of(outcome: Outcome, start: str) -> float:
    return next(at for at, text in outcome.lines if text.startswith(start))


def _one_or_many(module: str) -> dict[str, Callable[[Case], Measured]]:
    n = cores()
    return {
        f"1 process x {n} threads": contestant(module, ["--threads", str(n)], n),
        f"{n} processes x 1 thread": contestant(module, ["--processes", str(n), "--threads", "1"], 1),
    }


SYSTEMS = (
    System("fedmtl", "this project, `fedmtl run`", {"as it is": run_fedmtl}),
    System("naive", "naive HF loop (pad to 128, AdamW, deepcopy per client)", _one_or_many("naive")),
    System("trainer", "HF Trainer per client (dynamic padding, fused AdamW)", _one_or_many("hf_trainer"), TRAINER),
    System(
        "flower",
        "Flower 1.41 simulation (Ray), good client code",
        {f"{cores()} actors x 1 thread": contestant("flower_server", ["--actors", str(cores())], 1)},
        FLOWER,
    ),
    System(
        "pfl",
        "pfl 0.6, good client code",
        {
            f"1 process x {cores()} threads": contestant("pfl_simulation", ["--threads", str(cores())], cores()),
            f"{cores()} processes x 1 thread": torchrun("pfl_simulation", ["--threads", "1"]),
        },
        PFL,
    ),
)
