"""The runs of same_bits.py in one tree: a process forks itself for each, so that imports are made once.

    PYTHONPATH=TREE/src python scripts/same_bits_runs.py FOLDER TREE/src

runs the cases of FOLDER/jobs.json in FOLDER, and prints the outcome of each as one line of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("same_bits.yaml")
# Keys of a config that are not fedmtl's.
OURS = ("how", "needs", "same_as", "failures")
PATIENCE = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "300",
}


@dataclass(frozen=True)
class Case:
    """One config: what is set over the base, and how it is run."""

    name: str
    group: str
    settings: dict[str, Any]
    how: str = "run"
    needs: str | None = None
    same_as: str | None = None
    failures: bool = False

    def overrides(self) -> list[str]:
        """The settings as `--set` takes them; JSON is YAML."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]


@dataclass(frozen=True)
class Outcome:
    """What a run of one tree came to; `error` says why it came to nothing."""

    weights: str = ""
    results: list[list[str]] = field(default_factory=list)
    losses: list[list[Any]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    skipped: str = ""


def read_cases() -> tuple[dict[str, Any], list[Case]]:
    """The base config, and every config in the order of the table."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    cases = []
    for group, configs in table["configs"].items():
        for name, given in configs.items():
            ours = {key: given[key] for key in OURS if key in given}
            settings = {key: value for key, value in given.items() if key not in OURS}
            cases.append(Case(name, group, settings, **ours))
    return table["base"], cases


# The sessions of all runs so far.
STARTED: list[int] = []


class Failed(Exception):
    """A run that did not end as it should."""


def drive(folder: Path, source: Path) -> None:
    """Run the cases of jobs.json one after another, and print the outcome of each as one line of JSON."""
    package = importlib.import_module("fedmtl")
    assert Path(str(package.__file__)).is_relative_to(source), f"{package.__file__} is not in {source}"
    cases = [Case(**entry) for entry in json.loads((folder / "jobs.json").read_text())]
    os.chdir(folder)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    signal.signal(signal.SIGTERM, end_all)
    for number, case in enumerate(cases):
        started = time.monotonic()
        try:
            if reason := why_skipped(case):
                outcome = Outcome(skipped=reason)
            else:
                WAYS[case.how](case)
                outcome = read_outcome(Path("runs") / case.name, case)
        except Failed as failed:
            outcome = Outcome(error=str(failed))
        except (OSError, LookupError, ValueError) as error:
            outcome = Outcome(error=f"its run folder: {type(error).__name__}: {error}")
        seconds = time.monotonic() - started
        print(json.dumps({**asdict(outcome), "name": case.name, "seconds": seconds}), file=answers, flush=True)
        if number == 0:
            preload(folder / "modules.json")


def why_skipped(case: Case) -> str:
    needed = {"simulation": ("ray", "flwr"), "deployment": ("flwr",)}.get(case.how, ())
    needed += ("peft",) if "model.lora" in case.settings else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else ""


def preload(modules: Path) -> None:
    """Import what the first run imported, so that later ones find it there."""
    for name in json.loads(modules.read_text()):
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def start(case: Case, *arguments: str, log: str = "log", threads: int = 1) -> int:
    """Run a command of fedmtl in a fork of this process, as the leader of a session; returns its process id."""
    path = Path("logs") / f"{case.name}.{log}"
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        STARTED.append(pid)
        return pid
    os.setsid()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A shell without job control starts background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        if threads > 1:
            os.environ |= {name: str(threads) for name in ENVIRONMENT if name.endswith("NUM_THREADS")}
            os.execv(sys.executable, [sys.executable, "-m", "fedmtl", *arguments])
        sys.argv = ["fedmtl", *arguments]
        runpy.run_module("fedmtl", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        if not Path("modules.json").exists():
            names = [name for name in sys.modules if name != "__main__" and not name.endswith(".__main__")]
            Path("modules.json").write_text(json.dumps(names))
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(case: Case, pid: int, log: str = "log", expected: Sequence[int] = (0,)) -> None:
    """Wait for a command; another exit code than those expected, or none in time, is a failure."""
    end = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            end_session(pid)
            os.waitpid(pid, 0)
            raise Failed(f"no end after {PATIENCE:g} s")
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    if code not in expected:
        raise Failed(last_line(Path("logs") / f"{case.name}.{log}") or f"exit code {code}")


def end_all(number: int, frame: object) -> None:
    """End every run that is still going on, and this process."""
    for pid in STARTED:
        end_session(pid)
    os._exit(128 + number)


def end_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1]


def run_arguments(case: Case) -> list[str]:
    overrides = [word for override in case.overrides() for word in ("--set", override)]
    return ["run", "../base.yaml", "--name", case.name, *overrides]


def run_whole(case: Case) -> None:
    finish(case, start(case, *run_arguments(case)))


def run_with_two_threads(case: Case) -> None:
    """Compiled kernels are for one thread; with two, torch's operations are used."""
    finish(case, start(case, *run_arguments(case), threads=2))


def run_simulation(case: Case) -> None:
    finish(case, start(case, *run_arguments(case), "--engine", "flower"))


def run_resumed(case: Case) -> None:
    """Interrupt the run after its second round, wherever it is then, and resume it."""
    pid = start(case, *run_arguments(case))
    events = Path("runs") / case.name / "events.jsonl"
    end = time.monotonic() + PATIENCE
    while not any(event["event"] == "round" and event["round"] >= 2 for event in read_events(events)):
        if time.monotonic() > end or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
    finish(case, pid, expected=(128 + signal.SIGINT,))
    finish(case, start(case, "run", "--resume", f"runs/{case.name}"))


def run_deployed(case: Case) -> None:
    """A server and its sites on loopback, without keys."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = ["server", "--config", "../base.yaml", "--listen", address, *run_arguments(case)[2:]]
    started = {"log": start(case, *server)}
    try:
        for site, entry in case.settings["clients"].items():
            words = ["--client-id", site, "--tasks", ",".join(entry["tasks"]), "--server", address, "--device", "cpu"]
            started[site] = start(case, "client", *words, log=site)
        for log, pid in started.items():
            finish(case, pid, log)
    finally:
        for pid in started.values():
            end_session(pid)


WAYS: dict[str, Callable[[Case], None]] = {
    "run": run_whole,
    "two_threads": run_with_two_threads,
    "simulation": run_simulation,
    "resume": run_resumed,
    "deployment": run_deployed,
}


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events so far; a line that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def read_outcome(run: Path, case: Case) -> Outcome:
    events = read_events(run / "events.jsonl")
    ends = [event for event in events if event["event"] == "end"]
    if len(ends) != 1 or ends[0]["status"] != "done":
        raise Failed(f"events.jsonl: ends with {ends or 'no end'}")
    with (run / "results.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.reader(file))
    shown = [number for number, column in enumerate(table[0]) if "seconds" not in column]
    results = [[row[number] for number in shown] for row in table]
    failures = [row[results[0].index("failures")] for row in results[1:]]
    if any(map(int, failures)) != case.failures:
        reasons = [event["reason"] for event in events if event["event"] == "failure"]
        raise Failed(f"clients failed: {reasons[0]}" if reasons else "no client failed, which it is there for")
    losses = [[each["round"], each["task"], each["loss"]] for each in events if each["event"] == "evaluation"]
    return Outcome(ends[0]["weights_sha256"], results, sorted(losses))


if __name__ == "__main__":
    drive(*map(Path, sys.argv[1:]))
