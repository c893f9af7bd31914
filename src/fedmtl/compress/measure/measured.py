"""The nouns of a measurement, and what a score is worth beside a teacher's and beside the commonest class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fedmtl.tasks.metrics import Scores

# Two passes over the same text differ by less.
SAME = 1e-9
# From here on a machine is busy: passes that are longer than a time slice of the core are slowed more than short ones.
BUSY = 0.05


@dataclass(frozen=True)
class Load:
    """What a model is timed with: examples a pass, tokens a text, and the numbers of threads, one after the other."""

    batch: int = 1
    length: int = 128
    threads: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Variant:
    """A model that can be measured: a run's folder as fedmtl computes it, or an ONNX file.

    `model` is the folder of another round's model than the one that the run ended with.
    """

    name: str
    path: Path
    form: Literal["fedmtl", "onnx"]
    model: Path | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of a pass with so many threads, and examples a second over all passes.

    `waiting` is the share of the time that the process wanted a core and others had it; None where nobody counts it.
    """

    threads: int
    median: float
    p95: float
    per_second: float
    waiting: float | None = None


@dataclass(frozen=True)
class Measured:
    """What a variant costs and, unless scores were left out, what it is worth.

    `main` names every task's main metric, `floors` what always saying the commonest class scores in it. What an older
    file does not tell (`parameters`) or a system does not (`peak_bytes`) is None.
    """

    variant: Variant
    bytes: int
    compressed_bytes: int
    parameters: int | None
    flops: int
    peak_bytes: int | None
    timings: tuple[Timing, ...]
    scores: dict[str, Scores] | None
    main: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)

    @property
    def main_scores(self) -> dict[str, float | None]:
        """Every task's main metric."""
        return {task: scores.metrics[self.main[task]] for task, scores in (self.scores or {}).items()}


@dataclass(frozen=True)
class Teacher:
    """Whom retention is measured against: each task's main metric."""

    name: str
    scores: Mapping[str, float | None]


def retention(score: float | None, teacher: float | None) -> float | None:
    """The share of the teacher's score that is left; None where the teacher's is not above 0."""
    return None if score is None or teacher is None or teacher <= 0 else score / teacher


def retentions(measured: Measured, teacher: Teacher) -> dict[str, float | None]:
    """Every task's retention."""
    return {task: retention(score, teacher.scores.get(task)) for task, score in measured.main_scores.items()}


def mean(values: Mapping[str, float | None]) -> float | None:
    """The mean over tasks; None where one is undefined, as tasks left out would make another mean."""
    known = [value for value in values.values() if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def remarks(measured: Sequence[Measured], teacher: Teacher | None) -> list[str]:
    """What the numbers alone would hide, a line each."""
    lines: list[str] = []
    for task in dict.fromkeys(task for one in measured for task in one.floors):
        scored = [one for one in measured if one.scores and task in one.scores]
        lines += _undefined(task, scored) + _at_the_floor(task, scored)
        counts = sorted({one.scores[task].examples for one in scored if one.scores})
        if len(counts) > 1:
            lines.append(f"{task}: scored on different data ({' and '.join(map(str, counts))} examples)")
        if teacher is not None and task in teacher.scores:
            lines += _of_teacher(task, scored, teacher)
    return lines + _busy(measured)


def _busy(measured: Sequence[Measured]) -> list[str]:
    waits = [timing.waiting for one in measured for timing in one.timings if timing.waiting is not None]
    if not waits or max(waits) < BUSY:
        return []
    return [f"the machine was busy: up to {max(waits):.0%} of the time went into waiting for a core; measure again"]


def _undefined(task: str, scored: Sequence[Measured]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for one in scored:
        if one.scores and one.main_scores[task] is None:
            reason = one.scores[task].undefined.get(one.main[task], "undefined")
            reasons.setdefault(f"{task} has no {one.main[task]}, {reason}", []).append(one.variant.name)
    return [f"{words}: {', '.join(names)}" for words, names in reasons.items()]


def _at_the_floor(task: str, scored: Sequence[Measured]) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in scored:
        score, floor, metric = one.main_scores[task], one.floors[task], one.main[task]
        if score is not None and score <= floor + SAME:
            how = "equals" if score >= floor - SAME else "is below"
            whose = "that of the majority class" if metric in ("accuracy", "f1", "matthews") else "that of the mean"
            found.setdefault(f"{task} {metric} {how} {whose}, {floor:.3f}", []).append(one.variant.name)
    return [f"{words}: {', '.join(names)}" for words, names in found.items()]


def _of_teacher(task: str, scored: Sequence[Measured], teacher: Teacher) -> list[str]:
    score, floor = teacher.scores[task], scored[0].floors[task]
    if score is None or score <= 0:
        return [f"{task}: {teacher.name} has no score above 0, so there is no retention"]
    above = [one.variant.name for one in scored if (retentions(one, teacher)[task] or 0) > 1 + SAME]
    if score > floor + SAME or not above:
        return []
    return [f"{task}: {teacher.name} is at the majority class, so retention above 1 says little: {', '.join(above)}"]
