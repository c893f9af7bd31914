"""The table: every system on every population, interleaved, medians with their spread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from simulator.commands import CommandFailed, locked
from simulator.environments import NotInstalled, python_of
from simulator.systems import Case, Measured, System
from simulator.workload import SAMPLES

Note = Callable[[str], None]


@dataclass
class Contest:
    """All runs of one system on one population; `variant` is the one that goes on after the first repeat."""

    system: str
    words: str
    clients: int
    variant: str = ""
    tried: dict[str, float] = field(default_factory=dict)
    runs: list[Measured] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        runs = [{**asdict(run), "round": run.round} for run in self.runs]
        return {**{k: getattr(self, k) for k in ("system", "words", "clients", "variant", "tried")}, "runs": runs}


@dataclass(frozen=True)
class Plan:
    workload: Path
    populations: Sequence[int]
    rounds: Mapping[int, int]
    repeats: int
    envs: Path
    lock: Path | None


def compare(systems: Sequence[System], plan: Plan, skipped: dict[str, str], note: Note) -> list[Contest]:
    """Run A B C A B C ...; a system that cannot be installed or fails is left out with a line that says why."""
    interpreters = _interpreters(systems, plan.envs, skipped, note)
    contests = [
        Contest(system.name, system.words, clients)
        for clients in plan.populations
        for system in systems
        if system.name in interpreters
    ]
    known = {system.name: system for system in systems}
    for repeat in range(plan.repeats):
        for contest in contests:
            if contest.system in skipped:
                continue
            case = Case(plan.workload, contest.clients, plan.rounds[contest.clients], interpreters[contest.system])
            try:
                _one_repeat(contest, known[contest.system], case, plan.lock, note, repeat)
            except CommandFailed as failed:
                if contest.system == "fedmtl":
                    raise
                skipped[contest.system] = str(failed).splitlines()[0]
                note(f"{contest.system} is left out: {failed}")
    return [contest for contest in contests if contest.runs]


def _interpreters(systems: Sequence[System], envs: Path, skipped: dict[str, str], note: Note) -> dict[str, Path]:
    found = {}
    for system in systems:
        try:
            found[system.name] = python_of(system.environment, envs)
        except (NotInstalled, OSError) as error:
            skipped[system.name] = str(error)
            note(f"{system.name} is skipped: {error}")
    return found


def _one_repeat(contest: Contest, system: System, case: Case, lock: Path | None, note: Note, repeat: int) -> None:
    names = [contest.variant] if contest.variant else list(system.variants)
    measured: dict[str, Measured] = {}
    for name in names:
        with locked(lock):
            measured[name] = run = system.variants[name](case)
        _check(contest, run)
        note(
            f"{contest.clients:>3} clients, repeat {repeat + 1}: {contest.system} ({name}) {run.round:.2f} s a round,"
            f" {run.peak_mb:,.0f} MB, start-up {run.start_up:.1f} s, others {run.others:.2f} cores"
        )
    best = min(measured, key=lambda name: measured[name].round)
    contest.tried = contest.tried or {name: run.round for name, run in measured.items()}
    contest.variant = best
    contest.runs.append(measured[best])


def _check(contest: Contest, run: Measured) -> None:
    """All train the same examples; a difference would make the table worthless, so it ends the run."""
    wanted = contest.clients * SAMPLES
    if run.samples != wanted:
        sys.exit(f"{contest.system}: trained {run.samples} samples a round, not {wanted}")


def check_sizes(contests: Sequence[Contest]) -> None:
    sizes = {contest.system: contest.runs[0].parameters for contest in contests}
    if len(set(sizes.values())) > 1:
        sys.exit(f"the models differ in size: {sizes}")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return median(values), min(values), max(values)
