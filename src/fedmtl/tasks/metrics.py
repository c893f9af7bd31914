"""What predictions on any part of the data add up to, so that parts merge and no example travels; and metrics from it.

Each kind of task defines its sums (`tasks/kinds/`); a client may be hostile, so they are read strictly. A metric that
is not defined is None with a reason, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmtl.errors import WireError
from fedmtl.tasks.sequences import Rows, Sequences
from fedmtl.tasks.task import Task

if TYPE_CHECKING:
    # Workers score, and write no events.
    from fedmtl.runs.events import EvaluationEvent

MOST_EXAMPLES = 1 << 53
# The sum of a million of these is finite, and so is its square.
MOST_MOMENT = 1e100
MOST_LETTERS = 200
_BROKEN = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Sums(Protocol):
    """Sums of one task: of two parts of the data they add up to those of both.

    `broken` of the `examples` had outputs that were not finite; `loss` is the sum over the others.
    """

    @property
    def loss(self) -> float: ...

    @property
    def broken(self) -> int: ...

    @property
    def examples(self) -> int: ...

    def __add__(self, other: Any) -> Any: ...

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the kind's `read_sums` gives the same sums again, bit for bit."""
        ...


def sum_predictions(task: Task, outputs: Rows, labels: Rows, loss: float, keep_pairs: bool = False) -> Sums:
    """Add up a batch: rows of outputs, and labels as the task's kind has them. `loss` is the sum, not the mean."""
    assert len(outputs) == len(labels), "one label per row of outputs"
    if isinstance(outputs, Sequences):
        outputs = outputs.with_values(outputs.values.astype(np.float64))
    else:
        assert outputs.ndim == 2, "outputs are rows"
        outputs = outputs.astype(np.float64)
    finite = _finite(outputs)
    broken = int((~finite).sum())
    labels = labels[finite] if isinstance(labels, Sequences) else np.asarray(labels)[finite]
    return task.kind_of.sum_outputs(task, outputs[finite], labels, loss, keep_pairs=keep_pairs, broken=broken)


def _finite(rows: Rows) -> npt.NDArray[np.bool_]:
    """Which examples have finite numbers alone."""
    if not isinstance(rows, Sequences):
        return np.asarray(np.isfinite(rows).all(axis=1))
    broken = np.bincount(rows.owners(), ~np.isfinite(rows.values).all(axis=1), minlength=len(rows))
    return np.asarray(broken == 0)


def sums_from_dict(task: Task, data: Mapping[str, Any], *, with_pairs: bool = True) -> Sums:
    """The sums a client sent for a task; a WireError where they are not that task's.

    Unless `with_pairs`, predictions with their labels are refused: nobody wanted them.
    """
    if not isinstance(data, Mapping):
        raise WireError(f"evaluation sums: not a mapping for task {task.name}")
    return task.kind_of.read_sums(task, data, with_pairs=with_pairs)


# What a kind reads a stranger's sums with.


@contextmanager
def not_those_of(what: str) -> Iterator[None]:
    """Whatever goes wrong meanwhile is a WireError: these are not the sums of `what`."""
    try:
        yield
    except _BROKEN as error:
        # It may quote what a stranger sent.
        raise WireError(f"evaluation sums: not those of {what} ({repr(error)[:MOST_LETTERS]})") from None


def read_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("not a list")
    return value


def read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_EXAMPLES:
        raise ValueError("not a count")
    return value


def read_moment(value: Any) -> float:
    """A finite number whose sum over all clients is finite too."""
    if type(value) not in (int, float) or not abs(value) <= MOST_MOMENT:
        raise ValueError("not a finite number")
    return float(value)


def read_loss(value: Any) -> float:
    """Not less than 0, or not a number at all where a model's outputs were not."""
    if type(value) not in (int, float) or value < 0 or (math.isfinite(value) and value > MOST_MOMENT):
        raise ValueError("not a loss")
    return float(value)


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
