"""Metrics from sums. What is not defined is None with a reason, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedmtl.tasks.sums import Sums, sum_predictions, sums_from_dict
from fedmtl.tasks.task import Task

if TYPE_CHECKING:
    # Workers score, and write no events.
    from fedmtl.runs.events import EvaluationEvent

__all__ = [
    "Scores",
    "Sums",
    "averages",
    "constant_score",
    "evaluation_event",
    "score",
    "sum_predictions",
    "sums_from_dict",
]


@dataclass(frozen=True)
class Scores:
    """What a model scored on a task: every metric by name, of which one that is None has its reason in `undefined`.

    `marked` says in words where the model does no better than a constant. `loss` is the mean over the examples.
    """

    metrics: dict[str, float | None]
    undefined: dict[str, str]
    marked: str | None
    loss: float | None
    examples: int


def score(task: Task, sums: Sums) -> Scores:
    """All metrics of the task's kind, in a fixed order, in the units of its score_range."""
    values, marked = task.kind_of.score(task, sums)
    if sums.broken:
        reason = f"{sums.broken} of {sums.examples} predictions are not finite"
        values, marked = dict.fromkeys(values, reason), None
    return Scores(
        metrics={name: None if isinstance(value, str) else value for name, value in values.items()},
        undefined={name: value for name, value in values.items() if isinstance(value, str)},
        marked=marked,
        loss=sums.loss / sums.examples if sums.examples else None,
        examples=sums.examples,
    )


def averages(tasks: Sequence[Task], scores: Mapping[str, Scores]) -> tuple[float | None, float | None]:
    """The mean main metric of the tasks that count, and the mean accuracy of their classifications.

    None where a needed one is undefined or missing, or where no task counts.
    """
    counted = [task for task in tasks if not task.auxiliary]
    main = [(task, task.metric) for task in counted]
    accuracy = [(task, "accuracy") for task in counted if "accuracy" in task.kind_of.metrics]
    return _mean(main, scores), _mean(accuracy, scores)


def constant_score(task: Task, labels: np.ndarray) -> float:
    """The main metric of an answer that is always the commonest class; 0 where that, as a score's, is undefined."""
    return task.kind_of.constant_score(task, labels)


def evaluation_event(
    round_number: int, task: Task, sums: Sums, clients: Mapping[str, float | None] | None = None
) -> EvaluationEvent:
    """The `evaluation` event of a task; `clients` has their main metrics where it was scored at clients."""
    from fedmtl.runs.events import EvaluationEvent

    scores = score(task, sums)
    return EvaluationEvent(
        round=round_number,
        task=task.name,
        metrics=scores.metrics,
        undefined=scores.undefined,
        loss=scores.loss,
        examples=scores.examples,
        marked=scores.marked,
        clients=None if clients is None else dict(clients),
        **task.kind_of.evaluation_fields(task, sums),
    )


def _mean(wanted: Sequence[tuple[Task, str]], scores: Mapping[str, Scores]) -> float | None:
    values = [scores[task.name].metrics.get(metric) if task.name in scores else None for task, metric in wanted]
    defined = [value for value in values if value is not None]
    return math.fsum(defined) / len(defined) if defined and len(defined) == len(values) else None
