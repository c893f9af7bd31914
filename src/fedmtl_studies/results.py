"""What the finished cells of a study came to, by setup and seed, and means over seeds.

What is read of a cell is each study's choice; that it is read from the cell's run folder alone is common to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev
from typing import TypeVar

from fedmtl_studies.folder import StudyFolder, is_settled, record_path
from fedmtl_studies.library import EvaluationEvent, FedmtlError, RunFolder, StartEvent, read_events

ResultT = TypeVar("ResultT")
Value = TypeVar("Value")
# By setup and seed; None where a cell is not finished.
Results = Mapping[str, Mapping[int, ResultT | None]]
# The runs whose results a setup shows, by setup and seed.
Runs = Mapping[str, Mapping[int, RunFolder]]
_CORRELATIONS = ("matthews", "pearson", "spearman")


def read_results(folder: StudyFolder, runs: Runs, read: Callable[[RunFolder], ResultT]) -> Results[ResultT]:
    """Read what is finished; a run that is no cell of the study was finished before it began."""

    def result(run: RunFolder) -> ResultT | None:
        if run.path.parent != folder.cells:
            return read(run)
        return _read_once(read, run, record_path(run).stat().st_mtime_ns) if is_settled(run) else None

    return {setup: {seed: result(run) for seed, run in by_seed.items()} for setup, by_seed in runs.items()}


# All are read whenever a cell ends, and a settled one does not change.
@lru_cache(maxsize=4096)
def _read_once(read: Callable[[RunFolder], ResultT], run: RunFolder, settled: int) -> ResultT:
    return read(run)


def chance_levels(folder: StudyFolder, runs: Runs) -> dict[str, float]:
    """Return by TASK_METRIC what one answer for every validation example scores, as far as runs are finished."""
    found: dict[str, float] = {}
    for level in finished(read_results(folder, runs, read_chance)):
        for name, value in level.items():
            found.setdefault(name, value)
    return found


def read_chance(run: RunFolder) -> dict[str, float]:
    """Return by TASK_METRIC the accuracy of the majority class, and 0 for correlations, of a run's validation sets."""
    found: dict[str, float] = {}
    for event in read_events(run):
        if isinstance(event, EvaluationEvent):
            found |= chance_of(event)
    return found


def chance_of(event: EvaluationEvent) -> dict[str, float]:
    """Return by TASK_METRIC what one answer for every example of an evaluation scores, where that is known."""
    found = {f"{event.task}_{metric}": 0.0 for metric in _CORRELATIONS if metric in event.metrics}
    if event.confusion and any(map(any, event.confusion)):
        totals = [sum(row) for row in event.confusion]
        found[f"{event.task}_accuracy"] = max(totals) / sum(totals)
    return found


def finished(results: Results[ResultT], setups: Iterable[str] | None = None) -> list[ResultT]:
    """Return the finished cells of these setups, or of all."""
    names = results if setups is None else setups
    return [cell for name in names for cell in results.get(name, {}).values() if cell is not None]


def recorded(run: RunFolder, what: str, value: Value | None) -> Value:
    """Return a value that a study reads from a run's events; where they lack it, the error names both.

    Every finished run of this version has all of them; a teacher may come from an earlier one.
    """
    if value is None:
        raise FedmtlError(f"{run.events}: says nothing of {what}, which the study needs; make the run again")
    return value


def main_metrics(run: RunFolder, start: StartEvent) -> dict[str, str]:
    """Return the main metric of every task of a run."""
    return {task: recorded(run, f"the metric of {task}", facts.metric) for task, facts in start.tasks.items()}


@dataclass(frozen=True)
class Spread:
    """The mean of a number over seeds and its sample standard deviation; None where one seed says nothing of it."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and deviation; None where a value is missing: a mean over the seeds that went well would flatter."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(mean(known), stdev(known) if len(known) > 1 else None, len(known))


def single(value: float | None) -> Spread | None:
    """Return a number that is no mean over seeds as a table takes it."""
    return None if value is None else Spread(value, None, 1)


def over_seeds(results: Results[ResultT], setup: str, measure: Callable[[ResultT], float | None]) -> Spread | None:
    """Return the mean of a measure over a setup's seeds; None while a seed is missing."""
    return spread([None if one is None else measure(one) for one in results.get(setup, {}).values()])


def beside(
    results: Results[ResultT], setup: str, other: str, measure: Callable[[ResultT, ResultT], float | None]
) -> Spread | None:
    """Return the mean of a measure of a cell and the other setup's cell of its seed; None while one is missing."""
    others = results.get(other, {})
    pairs = [(one, others.get(seed)) for seed, one in results.get(setup, {}).items()]
    return spread([None if one is None or two is None else measure(one, two) for one, two in pairs])


def seconds_notes(cells_at_once: Iterable[int]) -> list[str]:
    """Return a note for a table with seconds, where cells shared the machine while they were taken."""
    most = max(cells_at_once, default=1)
    return [f"Seconds were taken with up to {most} cells at once on the machine."] if most > 1 else []
