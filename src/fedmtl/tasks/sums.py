"""What predictions on any part of the data add up to, so that parts merge and no example travels.

Second moments are kept centred and merged as in Chan, Golub and LeVeque, "Algorithms for Computing
the Sample Variance" (1983): raw sums of squares lose every digit when the mean is large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmtl.errors import WireError
from fedmtl.tasks.task import Task

RESIDUAL_BINS = 20
MOST_EXAMPLES = 1 << 53
# The sum of a million of these is finite, and so is its square.
MOST_MOMENT = 1e100
MOST_LETTERS = 200
# Sums are rounded: what follows from them is compared with this much room.
_MORE, _LEAST = 1.001, 1e-9
_BROKEN = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClassificationSums:
    """Counts of (true, predicted), and the loss added up over the same examples.

    `broken` counts examples whose outputs were not finite; they are in no cell.
    """

    confusion: Counts
    loss: float
    broken: int = 0

    @property
    def examples(self) -> int:
        return int(self.confusion.sum()) + self.broken

    def __add__(self, other: ClassificationSums) -> ClassificationSums:
        assert self.confusion.shape == other.confusion.shape, "sums of one task have one shape"
        return ClassificationSums(self.confusion + other.confusion, self.loss + other.loss, self.broken + other.broken)

    def to_dict(self) -> dict[str, Any]:
        return {"confusion": self.confusion.tolist(), "loss": self.loss, "broken": self.broken}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClassificationSums:
        """The sums again, bit for bit; a WireError where they could not have come from `to_dict`."""
        try:
            rows = [[_count(value) for value in _list(row)] for row in _list(data["confusion"])]
            sums = cls(np.array(rows, dtype=np.int64), _loss(data["loss"]), _count(data["broken"]))
        except _BROKEN as error:
            raise WireError(f"evaluation sums: not those of a classification ({_brief(error)})") from None
        if not rows or any(len(row) != len(rows) for row in rows) or sum(map(sum, rows)) >= MOST_EXAMPLES:
            raise WireError("evaluation sums: the confusion counts are not a square of counts")
        return sums


@dataclass(frozen=True, eq=False)
class RegressionSums:
    """Moments of predictions and scores, their errors and a histogram of residuals, in the score's units.

    `spread_` values are sums of squares about the mean, `spread_both` that of products. `residuals`
    counts prediction minus score in equal bins; what lies outside is in the outermost ones. `pairs`
    are all predictions and all scores, or None. `broken` counts predictions that were not finite;
    they are in no other sum.
    """

    count: int
    mean_prediction: float
    mean_score: float
    spread_prediction: float
    spread_score: float
    spread_both: float
    squared_error: float
    absolute_error: float
    range_prediction: tuple[float, float] | None
    range_score: tuple[float, float] | None
    residuals: Counts
    loss: float
    pairs: tuple[Floats, Floats] | None = None
    broken: int = 0

    @property
    def examples(self) -> int:
        return self.count + self.broken

    def __add__(self, other: RegressionSums) -> RegressionSums:
        count = self.count + other.count
        share = other.count / count if count else 0.0
        by_prediction = other.mean_prediction - self.mean_prediction
        by_score = other.mean_score - self.mean_score
        both = self.count * share
        return RegressionSums(
            count=count,
            mean_prediction=self.mean_prediction + by_prediction * share,
            mean_score=self.mean_score + by_score * share,
            spread_prediction=self.spread_prediction + other.spread_prediction + by_prediction**2 * both,
            spread_score=self.spread_score + other.spread_score + by_score**2 * both,
            spread_both=self.spread_both + other.spread_both + by_prediction * by_score * both,
            squared_error=self.squared_error + other.squared_error,
            absolute_error=self.absolute_error + other.absolute_error,
            range_prediction=_hull(self.range_prediction, other.range_prediction),
            range_score=_hull(self.range_score, other.range_score),
            residuals=self.residuals + other.residuals,
            loss=self.loss + other.loss,
            pairs=_join_pairs(self, other),
            broken=self.broken + other.broken,
        )

    def moments(self) -> dict[str, Any]:
        """Everything but the histogram, the loss and the pairs, in JSON's types."""
        ranges = {name: value and list(value) for name in _RANGES for value in [getattr(self, name)]}
        return {"count": self.count, **{name: getattr(self, name) for name in _MOMENTS}, **ranges}

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.moments(),
            "residuals": self.residuals.tolist(),
            "loss": self.loss,
            "pairs": None if self.pairs is None else [values.tolist() for values in self.pairs],
            "broken": self.broken,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RegressionSums:
        """The sums again, bit for bit; a WireError where they could not have come from `to_dict`."""
        try:
            values: dict[str, Any] = {name: _moment(data[name]) for name in _MOMENTS}
            values |= {name: _range(data[name]) for name in _RANGES}
            values |= {name: _count(data[name]) for name in ("count", "broken")}
            residuals = [_count(value) for value in _list(data["residuals"])]
            pairs = None if data["pairs"] is None else _pairs(data["pairs"])
            sums = cls(residuals=np.array(residuals, dtype=np.int64), loss=_loss(data["loss"]), pairs=pairs, **values)
        except _BROKEN as error:
            raise WireError(f"evaluation sums: not those of a regression ({_brief(error)})") from None
        if not _is_consistent(sums):
            raise WireError("evaluation sums: counts, moments, residuals and pairs are not of the same examples")
        return sums


_MOMENTS = (
    "mean_prediction",
    "mean_score",
    "spread_prediction",
    "spread_score",
    "spread_both",
    "squared_error",
    "absolute_error",
)
_RANGES = ("range_prediction", "range_score")

Sums = ClassificationSums | RegressionSums


def sum_predictions(
    task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any], loss: float, keep_pairs: bool = False
) -> Sums:
    """Add up a batch. `loss` is the sum over its examples, not the mean.

    A classification has logits [n, outputs] and label indices; one output means the second label
    where it is positive. A regression has predictions [n, 1] and scores, both scaled to 0..1.
    """
    assert len(outputs) == len(labels), "one label per row of outputs"
    assert outputs.ndim == 2, "outputs are rows"
    outputs = outputs.astype(np.float64)
    finite = np.isfinite(outputs).all(axis=1)
    broken = int((~finite).sum())
    outputs, labels = outputs[finite], np.asarray(labels)[finite]
    if task.is_regression:
        return _sum_scores(task, outputs[:, 0], labels, loss, keep_pairs, broken)
    predicted = (outputs[:, 0] > 0).astype(np.int64) if outputs.shape[1] == 1 else outputs.argmax(axis=1)
    num_labels = len(task.labels)
    cells = np.bincount(labels.astype(np.int64) * num_labels + predicted, minlength=num_labels**2)
    return ClassificationSums(cells.astype(np.int64).reshape(num_labels, num_labels), float(loss), broken)


def sums_from_dict(task: Task, data: Mapping[str, Any], *, with_pairs: bool = True) -> Sums:
    """The sums a client sent for a task; a WireError where they are not that task's.

    Unless `with_pairs`, predictions with their labels are refused: nobody wanted them.
    """
    if not isinstance(data, Mapping):
        raise WireError(f"evaluation sums: not a mapping for task {task.name}")
    if task.is_regression:
        scores = RegressionSums.from_dict(data)
        if scores.pairs is not None and not with_pairs:
            raise WireError(f"evaluation sums: predictions with labels of task {task.name}, which were not requested")
        if not _is_within(task, scores):
            raise WireError(f"evaluation sums: labels outside the score_range of task {task.name}")
        return scores
    sums = ClassificationSums.from_dict(data)
    if len(sums.confusion) != len(task.labels):
        raise WireError(
            f"evaluation sums: {len(sums.confusion)} labels, task {task.name} has {len(task.labels)};"
            " give client and server the same labels"
        )
    return sums


def residual_edges(task: Task) -> Floats:
    """The 21 edges of the residuals' histogram: from minus to plus the score's range."""
    low, high = task.score_range
    return np.linspace(low - high, high - low, RESIDUAL_BINS + 1)


def _sum_scores(
    task: Task, scaled: Floats, labels: npt.NDArray[Any], loss: float, keep_pairs: bool, broken: int
) -> RegressionSums:
    low, high = task.score_range
    predictions = low + (high - low) * scaled
    scores = low + (high - low) * labels.astype(np.float64)
    count = len(scores)
    mean_prediction = float(predictions.mean()) if count else 0.0
    mean_score = float(scores.mean()) if count else 0.0
    from_prediction, from_score = predictions - mean_prediction, scores - mean_score
    residuals = predictions - scores
    edges = residual_edges(task)
    bins, _ = np.histogram(np.clip(residuals, edges[0], edges[-1]), bins=edges)
    return RegressionSums(
        count=count,
        mean_prediction=mean_prediction,
        mean_score=mean_score,
        spread_prediction=float(from_prediction @ from_prediction),
        spread_score=float(from_score @ from_score),
        spread_both=float(from_prediction @ from_score),
        squared_error=float(residuals @ residuals),
        absolute_error=float(np.abs(residuals).sum()),
        range_prediction=(float(predictions.min()), float(predictions.max())) if count else None,
        range_score=(float(scores.min()), float(scores.max())) if count else None,
        residuals=bins.astype(np.int64),
        loss=float(loss),
        pairs=(predictions, scores) if keep_pairs else None,
        broken=broken,
    )


def _hull(a: tuple[float, float] | None, b: tuple[float, float] | None) -> tuple[float, float] | None:
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


def _join_pairs(a: RegressionSums, b: RegressionSums) -> tuple[Floats, Floats] | None:
    if a.count == 0 or b.count == 0:
        return b.pairs if a.count == 0 else a.pairs
    if a.pairs is None or b.pairs is None:
        return None
    return np.concatenate([a.pairs[0], b.pairs[0]]), np.concatenate([a.pairs[1], b.pairs[1]])


def _brief(error: Exception) -> str:
    """The error in a line; it may quote what a stranger sent."""
    return repr(error)[:MOST_LETTERS]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("not a list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_EXAMPLES:
        raise ValueError("not a count")
    return value


def _moment(value: Any) -> float:
    """A finite number whose sum over all clients is finite too."""
    if type(value) not in (int, float) or not abs(value) <= MOST_MOMENT:
        raise ValueError("not a finite number")
    return float(value)


def _loss(value: Any) -> float:
    """Not less than 0, or not a number at all where a model's outputs were not."""
    if type(value) not in (int, float) or value < 0 or (math.isfinite(value) and value > MOST_MOMENT):
        raise ValueError("not a loss")
    return float(value)


def _range(values: Any) -> tuple[float, float] | None:
    if values is None:
        return None
    low, high = map(_moment, _list(values))
    return low, high


def _pairs(values: Any) -> tuple[Floats, Floats]:
    predictions, scores = (np.array([_moment(value) for value in _list(part)], np.float64) for part in _list(values))
    return predictions, scores


def _is_consistent(sums: RegressionSums) -> bool:
    """Whether some predictions and scores can have these sums; a little more is allowed for rounding."""
    mean_square = sums.squared_error / sums.count if sums.count else 0.0
    return (
        _spans(sums.range_prediction, sums.mean_prediction, sums.spread_prediction, sums.count)
        and _spans(sums.range_score, sums.mean_score, sums.spread_score, sums.count)
        and abs(sums.spread_both) <= _MORE * math.sqrt(sums.spread_prediction) * math.sqrt(sums.spread_score) + _LEAST
        and sums.squared_error >= 0
        and 0 <= sums.absolute_error <= _MORE * sums.count * math.sqrt(mean_square) + _LEAST
        and sums.residuals.shape == (RESIDUAL_BINS,)
        and sum(sums.residuals.tolist()) == sums.count
        and _are_pairs(sums)
    )


def _spans(span: tuple[float, float] | None, mean: float, spread: float, count: int) -> bool:
    if span is None:
        return count == 0 and mean == 0 and spread == 0
    low, high = span
    slack = _LEAST + (_MORE - 1) * max(abs(low), abs(high))
    # Two values d apart have at least d**2 / 2 between them; less would divide by nothing later. None has more than d
    # to the mean.
    width = (high - low) ** 2
    is_between = low - slack <= mean <= high + slack
    return count > 0 and low <= high and is_between and 0.49 * width <= spread <= _MORE * count * width + slack**2


def _are_pairs(sums: RegressionSums) -> bool:
    """Whether the pairs, if there are any, are as many as were counted, and have the ranges that are claimed."""
    if sums.pairs is None:
        return True
    spans = (sums.range_prediction, sums.range_score)
    return all(
        len(values) == sums.count and (not len(values) or (values.min(), values.max()) == span)
        for values, span in zip(sums.pairs, spans, strict=True)
    )


def _is_within(task: Task, sums: RegressionSums) -> bool:
    """Whether the scores lie in the task's range, to the precision labels have."""
    low, high = task.score_range
    slack = 1e-5 * max(high - low, abs(low), abs(high))
    span = sums.range_score
    return span is None or (low - slack <= span[0] and span[1] <= high + slack)
