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
            confusion = np.array(data["confusion"], dtype=np.int64)
            sums = cls(confusion, float(data["loss"]), int(data["broken"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"evaluation sums: not those of a classification ({error})") from None
        if confusion.ndim != 2 or len(set(confusion.shape)) != 1 or (confusion < 0).any() or sums.broken < 0:
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
            values: dict[str, Any] = {name: float(data[name]) for name in (*_MOMENTS, "loss")}
            values |= {name: _floats(data[name]) for name in _RANGES}
            values |= {name: int(data[name]) for name in ("count", "broken")}
            pairs = data["pairs"] and tuple(np.array(part, dtype=np.float64) for part in data["pairs"])
            sums = cls(residuals=np.array(data["residuals"], dtype=np.int64), pairs=pairs, **values)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"evaluation sums: not those of a regression ({error})") from None
        if not _is_consistent(sums):
            raise WireError("evaluation sums: counts, residuals and pairs are not of the same examples")
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


def sums_from_dict(task: Task, data: Mapping[str, Any]) -> Sums:
    """The sums a client sent for a task; a WireError where they are not that task's."""
    if task.is_regression:
        return RegressionSums.from_dict(data)
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


def _floats(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))


def _is_consistent(sums: RegressionSums) -> bool:
    pairs = sums.pairs
    return (
        sums.count >= 0
        and sums.broken >= 0
        and all(math.isfinite(getattr(sums, name)) for name in _MOMENTS)
        and _spans(sums.range_prediction, sums.spread_prediction, sums.count)
        and _spans(sums.range_score, sums.spread_score, sums.count)
        and sums.residuals.shape == (RESIDUAL_BINS,)
        and bool((sums.residuals >= 0).all())
        and int(sums.residuals.sum()) == sums.count
        and (pairs is None or [values.shape for values in pairs] == [(sums.count,)] * 2)
    )


def _spans(span: tuple[float, float] | None, spread: float, count: int) -> bool:
    if span is None or len(span) != 2:
        return span is None and count == 0
    # Two values d apart have at least d**2 / 2 between them; less would divide by nothing later.
    return span[0] <= span[1] and spread >= 0.49 * (span[1] - span[0]) ** 2
