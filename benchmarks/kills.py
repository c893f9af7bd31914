"""Kills processes of small runs at random moments, and checks that nothing of it shows in what the runs come to.

    python benchmarks/kills.py [--kills 100] [--seed 0] [--configs personal int8 ...] [--out FILE.json]

Half of the trials are runs on one machine with two workers (`fedmtl run`), half are deployments on loopback with TLS
and keys (`fedmtl server`, three of `fedmtl client`). In each, some processes are killed with SIGKILL, every one in
another round, at a moment drawn by the seed; before round 0 and after the last round count too. Who is killed is
started again as a user would: with `--resume`, or as the same site. A run must then be what the undisturbed run of its
config is: the same weights, the same states at the clients, every round and every client's update exactly once, no
failure. A deployment's server needs all three sites (federation.min_clients).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmtl.config.file import dump_config, load_config
from fedmtl.engines.flower.certificates import make_authority, make_node_key
from fedmtl.engines.flower.enrolment import enroll
from fedmtl.errors import FedmtlError
from fedmtl.runs.event_lines import events_of
from fedmtl.runs.events import EndEvent, FailureEvent, RoundEvent, UpdateEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events

TASKS = ("sentiment", "paraphrase", "similarity")
SITES = {f"{task}_client": task for task in TASKS}
ROUNDS = 8
SMALL = (
    "model.server_model=random-1x32",
    *(f"tasks.{task}={{train_samples: 40, val_samples: 24}}" for task in TASKS),
    "federation.clients_per_task=1",
    f"federation.min_clients={len(SITES)}",
    "federation.round_timeout=300",
    "federation.join_timeout=300",
    f"training.num_rounds={ROUNDS}",
    # Rounds long enough to be struck in.
    "training.local_epochs=25",
    "training.batch_size=8",
    "training.learning_rate=1e-3",
    "compute.workers=2",
    "compute.device=cpu",
)
CONFIGS = {
    "personal": ('sharing.rules=[{"heads.*": client}, {"*": all}]', "training.keep_optimizer=true"),
    "int8": ("wire.down=int8", "wire.up=int8"),
    "fedadam": ("federation.server_optimizer.kind=fedadam",),
    "adaptive": (
        "model.server_model=random-2x32",
        "sharing.adaptive={split_below: 0.98, merge_above: 0.99, patience: 1, warmup_rounds: 0, smoothing: 0.3}",
        "tasks.sentiment.patience=2",
    ),
}
# Of one trial; every one strikes in another round.
MOST_KILLS = 8
PATIENCE = 600.0
START_SECONDS = 8.0


class Fault(Exception):
    """A trial that hung or ended with an error."""


@dataclass
class Program:
    """One fedmtl command in a new session; whatever it writes goes to `log`."""

    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> bool:
        """SIGKILL for the program alone; whether it was still there."""
        if self.process.poll() is not None:
            return False
        self.process.kill()
        self.process.wait()
        return True

    def workers(self) -> list[int]:
        """Its worker processes: the children of its fork server."""
        members = {pid: parent for pid, parent in session_members(self.process.pid).items() if pid != self.process.pid}
        servers = [pid for pid, parent in members.items() if parent == self.process.pid and is_fork_server(pid)]
        return sorted(pid for pid, parent in members.items() if parent in servers)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Fault(f"{self.log.name} hangs; its last lines: {self.tail()}") from None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-600:]


def session_members(session: int) -> dict[int, int]:
    """The processes of a session that are not zombies, and their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, _, session_id = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session_id) == session and state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def is_fork_server(pid: int) -> bool:
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass
class Programs:
    """Starts commands in a folder, and ends what is left of them."""

    folder: Path
    started: list[Program] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> Program:
        log = self.folder / f"{len(self.started):02d}-{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedmtl", *arguments],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )
        self.started.append(Program(log, process))
        return self.started[-1]

    def end(self) -> int:
        """Kill what is still there after ten seconds; how many processes those were."""
        until = time.monotonic() + 10
        left: list[int] = []
        while left := [pid for program in self.started for pid in session_members(program.process.pid)]:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for program in self.started:
            program.process.wait()
        return len(left)


@dataclass(frozen=True)
class Outcome:
    """What a run came to, as far as it has to be the same however often it was disturbed."""

    sha: str
    states: dict[str, str]
    rounds: list[int]
    rows: list[int]
    updates: list[tuple[int, str]]
    failures: list[str]


def outcome(run: RunFolder, states: dict[str, Path]) -> Outcome:
    """The outcome of a finished run; `states` are the folders of what stays at its clients."""
    events = read_events(run)
    ends = events_of(events, EndEvent)
    if len(ends) != 1 or ends[0].status != "done":
        raise Fault(f"{run.name}: is not done, or more than once ({len(ends)} `end` events)")
    with run.results.open(newline="") as file:
        rows = [int(row["round"]) for row in csv.DictReader(file)]
    return Outcome(
        ends[0].weights_sha256,
        {client: last_state(folder) for client, folder in states.items()},
        [event.round for event in events_of(events, RoundEvent)],
        rows,
        [(event.round, event.client) for event in events_of(events, UpdateEvent)],
        [f"round {event.round}, {event.client}: {event.reason}" for event in events_of(events, FailureEvent)],
    )


def last_state(folder: Path) -> str:
    """The digest of a client's newest state."""
    files = sorted(folder.glob("round-*.safetensors"))
    return f"{files[-1].stem} {hashlib.sha256(files[-1].read_bytes()).hexdigest()}" if files else "none"


def last_round(run: RunFolder) -> int:
    if not run.events.exists():
        return -1
    found = re.findall(r'"event": "round", "round": (\d+)', run.events.read_text())
    return max(map(int, found), default=-1)


@dataclass
class Machine:
    """A run on one machine."""

    programs: Programs
    victims = ("run", "worker")

    def __post_init__(self) -> None:
        self._names = (f"killed{number}" for number in range(100))
        self.start("run")

    def start(self, victim: str) -> None:
        if hasattr(self, "run") and self.run.config.exists():
            self.main = self.programs.start("resumed", "run", "--resume", str(self.run.path))
            return
        # Killed before it was a run: a user starts it anew.
        name = next(self._names)
        self.run = RunFolder(self.programs.folder / "runs" / name)
        self.main = self.programs.start("run", "run", "run.yaml", "--name", name)

    def strike(self, victim: str, chance: random.Random) -> bool:
        """Kill; whether there was something to kill."""
        if victim == "worker":
            return kill_one(self.main.workers, chance)
        if not self.main.kill():
            return False
        self.start(victim)
        return True

    def finish(self) -> Outcome:
        if self.main.wait(PATIENCE):
            raise Fault(f"ended with code {self.main.process.returncode}: {self.main.tail()}")
        return outcome(self.run, {client: self.run.clients / client for client in SITES})


@dataclass
class Deployment:
    """A server and three sites."""

    programs: Programs
    victims = ("server", "server's worker", "site", "site's worker")

    def __post_init__(self) -> None:
        folder = self.programs.folder
        make_authority(folder / "certs", ["127.0.0.1"])
        for name, task in SITES.items():
            enroll(folder / "certs", name, make_node_key(name, folder / "keys")[1].read_bytes(), [task])
        self._address = f"127.0.0.1:{free_port()}"
        self._names = (f"killed{number}" for number in range(100))
        self._start_server()
        self._sites = {name: self._start_site(name) for name in SITES}

    def _start_server(self) -> None:
        if hasattr(self, "run") and (self.run.path / "place.json").exists():
            self.main = self.programs.start("server-resumed", "server", "--resume", str(self.run.path))
            return
        name = next(self._names)
        self.run = RunFolder(self.programs.folder / "runs" / name)
        where = ("--listen", self._address, "--certs", "certs", "--name", name)
        self.main = self.programs.start("server", "server", "--config", "run.yaml", *where)

    def _start_site(self, name: str) -> Program:
        keys = ("--ca", "certs/ca.crt", "--key", f"keys/{name}.key")
        who = ("--client-id", name, "--tasks", SITES[name], "--device", "cpu")
        return self.programs.start(name, "client", *who, "--server", self._address, *keys)

    def strike(self, victim: str, chance: random.Random) -> bool:
        """Kill; whether there was something to kill."""
        name = chance.choice(sorted(SITES))
        if victim == "server's worker":
            return kill_one(self.main.workers, chance)
        if victim == "site's worker":
            return kill_one(self._sites[name].workers, chance)
        if victim == "site":
            if not self._sites[name].kill():
                return False
            self._sites[name] = self._start_site(name)
            return True
        if not self.main.kill():
            return False
        self._start_server()
        return True

    def finish(self) -> Outcome:
        if self.main.wait(PATIENCE):
            raise Fault(f"the server ended with code {self.main.process.returncode}: {self.main.tail()}")
        for site in self._sites.values():
            # One that was away when the run ended goes on looking for its server.
            try:
                site.process.wait(15)
            except subprocess.TimeoutExpired:
                site.process.terminate()
            if site.wait(60) not in (0, 128 + signal.SIGTERM):
                raise Fault(f"a site ended with code {site.process.returncode}: {site.tail()}")
        number = json.loads((self.run.path / "place.json").read_text())["id"]
        folder = self.programs.folder / "sites"
        return outcome(self.run, {client: folder / client / number / client for client in SITES})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def kill_one(find: Callable[[], list[int]], chance: random.Random) -> bool:
    """Kill one of the processes, for which there is a moment if they are just being started."""
    until = time.monotonic() + 3
    while not (workers := find()) and time.monotonic() < until:
        time.sleep(0.02)
    if not workers:
        return False
    try:
        os.kill(chance.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


SETUPS: dict[str, Callable[[Programs], Machine | Deployment]] = {"machine": Machine, "deployment": Deployment}


@dataclass
class Trial:
    """One run that was disturbed, and how it differs from the undisturbed one."""

    config: str
    setup: str
    kills: list[str] = field(default_factory=list)
    is_same_sha: bool = False
    are_same_states: bool = False
    rounds_lost: int = 0
    rounds_doubled: int = 0
    updates_lost: int = 0
    updates_doubled: int = 0
    processes_left: int = 0
    failures: list[str] = field(default_factory=list)
    fault: str = ""
    seconds: float = 0.0

    def compare(self, found: Outcome, calm: Outcome) -> None:
        self.is_same_sha, self.are_same_states = found.sha == calm.sha, found.states == calm.states
        for numbers in (found.rounds, found.rows):
            self.rounds_lost += len(set(calm.rounds) - set(numbers))
            self.rounds_doubled += len(numbers) - len(set(numbers))
        self.updates_lost = len(set(calm.updates) - set(found.updates))
        self.updates_doubled = len(found.updates) - len(set(found.updates))
        self.failures = found.failures

    @property
    def is_clean(self) -> bool:
        counts = (self.rounds_lost, self.rounds_doubled, self.updates_lost, self.updates_doubled, self.processes_left)
        return self.is_same_sha and self.are_same_states and not any(counts) and not self.failures and not self.fault


def disturb(setup: Machine | Deployment, trial: Trial, chance: random.Random, pace: float, num_kills: int) -> None:
    """Strike at random moments; before round 0 the start is longer than a round.

    A round ends between two strikes: no job is struck twice, which would rightly be its client's failure.
    """
    struck = -2
    for point in sorted(chance.sample(range(-1, ROUNDS + 1), num_kills)):
        victim = chance.choice(setup.victims)
        delay = chance.uniform(0, START_SECONDS if point < 0 else pace)
        until = time.monotonic() + PATIENCE
        while last_round(setup.run) < max(point, struck + 1) and setup.main.process.poll() is None:
            if time.monotonic() > until:
                raise Fault(f"no round {point} within {PATIENCE:g} s: {setup.main.tail()}")
            time.sleep(0.005)
        time.sleep(delay)
        struck = last_round(setup.run)
        if setup.strike(victim, chance):
            trial.kills.append(victim)


def run_trial(config: str, setup: str, folder: Path, calm: Outcome, pace: float, seed: str, num_kills: int) -> Trial:
    """A run with that many strikes, which may miss, in a new folder; `pace` is the seconds of a round."""
    trial = Trial(config, setup)
    began = time.monotonic()
    write_config(config, folder)
    programs = Programs(folder)
    try:
        opened = SETUPS[setup](programs)
        disturb(opened, trial, random.Random(seed), pace, num_kills)
        trial.compare(opened.finish(), calm)
    except (Fault, FedmtlError, OSError) as error:
        trial.fault = f"{type(error).__name__}: {error}"
    finally:
        if trial.fault:
            for program in programs.started:
                program.kill()
        trial.processes_left = programs.end()
    trial.seconds = time.monotonic() - began
    return trial


def write_config(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    config = load_config(None, [*SMALL, *CONFIGS[name], f"output={folder / 'runs'}"])
    (folder / "run.yaml").write_text(dump_config(config))


def run_calm(config: str, folder: Path) -> tuple[Outcome, float]:
    """The outcome of an undisturbed run, and the seconds of a round."""
    write_config(config, folder)
    programs = Programs(folder)
    try:
        machine = Machine(programs)
        found = machine.finish()
    finally:
        programs.end()
    seconds = [event.seconds for event in events_of(read_events(machine.run), RoundEvent)]
    return found, statistics.median(seconds)


def run_trials(
    configs: Sequence[str],
    setups: Sequence[str],
    num_kills: int,
    seed: int,
    folder: Path,
    say: Callable[[Trial], None],
    most_kills: int = MOST_KILLS,
) -> list[Trial]:
    """Trials of all configs and set-ups in rotation, until that many processes were killed, `most_kills` in each."""
    calm = {name: run_calm(name, folder / f"calm-{name}") for name in configs}
    trials: list[Trial] = []
    while (left := num_kills - sum(len(trial.kills) for trial in trials)) > 0:
        number = len(trials)
        config, setup = configs[number // len(setups) % len(configs)], setups[number % len(setups)]
        trial_folder = folder / f"{number:03d}-{config}-{setup}"
        expected, pace = calm[config]
        trial = run_trial(config, setup, trial_folder, expected, pace, f"{seed}-{number}", min(left, most_kills))
        trials.append(trial)
        say(trial)
    return trials


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    kills = {config: Counter[str]() for config in dict.fromkeys(trial.config for trial in trials)}
    for trial in trials:
        kills[trial.config].update(trial.kills)
    counts = ("rounds_lost", "rounds_doubled", "updates_lost", "updates_doubled", "processes_left")
    return {
        "kills": sum(map(Counter.total, kills.values())),
        "kills_by_victim": dict(sum(kills.values(), Counter[str]())),
        "kills_by_config": {config: dict(victims) for config, victims in kills.items()},
        "runs": len(trials),
        "same_sha": sum(trial.is_same_sha for trial in trials),
        "same_client_states": sum(trial.are_same_states for trial in trials),
        **{name: sum(getattr(trial, name) for trial in trials) for name in counts},
        "failures": [line for trial in trials for line in trial.failures],
        "faults": [trial.fault for trial in trials if trial.fault],
        "seconds": round(sum(trial.seconds for trial in trials)),
    }


def table(trials: Sequence[Trial]) -> str:
    """One line for each config and set-up."""
    heads = ("config", "set-up", "runs", "kills", "same sha", "same states", "rounds", "updates", "failures", "faults")
    lines = ["  ".join(f"{head:>11}" for head in heads)]
    for config, setup in dict.fromkeys((trial.config, trial.setup) for trial in trials):
        group = [trial for trial in trials if (trial.config, trial.setup) == (config, setup)]
        cells = (
            config,
            setup,
            len(group),
            sum(len(trial.kills) for trial in group),
            sum(trial.is_same_sha for trial in group),
            sum(trial.are_same_states for trial in group),
            f"-{sum(trial.rounds_lost for trial in group)} +{sum(trial.rounds_doubled for trial in group)}",
            f"-{sum(trial.updates_lost for trial in group)} +{sum(trial.updates_doubled for trial in group)}",
            sum(len(trial.failures) for trial in group),
            sum(bool(trial.fault) for trial in group),
        )
        lines.append("  ".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--work", type=Path, help="folder for the runs, which stay; without it they are removed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kills.json")
    options = parser.parse_args()

    def say(trial: Trial) -> None:
        verdict = "same" if trial.is_clean else f"DIFFERS {vars(trial)}"
        print(f"{trial.config} {trial.setup}: {', '.join(trial.kills)}: {verdict} ({trial.seconds:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        trials = run_trials(options.configs, options.setups, options.kills, options.seed, folder, say)
    record = {
        "seed": options.seed,
        "cores": os.cpu_count(),
        **summary(trials),
        "trials": [vars(trial) for trial in trials],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(trials))
    return 0 if all(trial.is_clean for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
