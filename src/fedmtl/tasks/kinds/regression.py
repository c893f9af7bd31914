"""Regression: a score within a range, by squared error; the model predicts scores scaled to 0..1.

Second moments are stored centred and merged as in Chan, Golub and LeVeque, "Algorithms for Computing the Sample
Variance" (1983): raw sums of squares lose every digit when the mean is large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmtl.config import TaskConfig
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.tasks.builtin import BuiltinTask
from fedmtl.tasks.kinds.protocol import Answer, PlainHead, TaskKind, Value, wrong_outputs
from fedmtl.tasks.metrics import Counts, Floats, not_those_of, read_count, read_list, read_loss, read_moment
from fedmtl.tasks.sources import Table, as_number
from fedmtl.tasks.task import SCORE_RANGES, Task

if TYPE_CHECKING:
    from torch import Tensor

NEEDS_PAIRS = "needs pairs of prediction and label; set evaluation.share_pairs"
MEAN = "no better than the mean prediction"
# From this correlation on, predictions know something that their mean does not.
FOLLOWS = 0.1
# Two passes over one text differ by this share of the range when padded differently: no difference.
_SAME = 1e-6
# A smaller sum of squares, in units of the range, may be what rounding left of numbers that clients added up.
_ROUNDED = 1e-7
RESIDUAL_BINS = 20
# Into how many quantiles scores are cut to be dealt unevenly.
SCORE_BINS = 5
# Sums are rounded: what follows from them is compared with this much tolerance.
_MORE, _LEAST = 1.001, 1e-9


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
        with not_those_of("a regression"):
            values: dict[str, Any] = {name: read_moment(data[name]) for name in _MOMENTS}
            values |= {name: _range(data[name]) for name in _RANGES}
            values |= {name: read_count(data[name]) for name in ("count", "broken")}
            residuals = [read_count(value) for value in read_list(data["residuals"])]
            pairs = None if data["pairs"] is None else _pairs(data["pairs"])
            sums = cls(
                residuals=np.array(residuals, dtype=np.int64), loss=read_loss(data["loss"]), pairs=pairs, **values
            )
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


class Regression(TaskKind):
    """One output, the score scaled to 0..1 by `Task.score_range`."""

    name = "regression"
    metrics = ("pearson", "spearman", "mse", "rmse", "mae", "r2")
    main_metrics = ("pearson", "spearman")
    # Similar texts have a high score: a pretrained encoder already means something by a cosine.
    starts_at_cosine = True
    likelihood_factor = 0.5

    def labels(self, name: str, given: TaskConfig, defaults: BuiltinTask, found: Sequence[str] = ()) -> tuple[str, ...]:
        if given.labels:
            raise ConfigError(f"tasks.{name}.labels: found on {self.words}; write `score_range: [LOW, HIGH]` instead")
        return ()

    def score_range(self, name: str, given: TaskConfig, defaults: BuiltinTask) -> tuple[float, float]:
        scores = given.score_range or defaults.score_range
        if scores is None:
            raise ConfigError(
                f"tasks.{name}.score_range: found nothing, and {self.words} needs its lowest and highest score; "
                "write `score_range: [0, 5]` for scores from 0 to 5"
            )
        return scores

    def outputs(self, name: str, given: TaskConfig, labels: Sequence[str]) -> int:
        if given.outputs is not None:
            raise wrong_outputs(name, given, self.words)
        return 1

    def problem(self, task: Task) -> str | None:
        if task.outputs not in (1, 2):
            return "a head has one output or two"
        low, high = task.score_range
        return None if -1e30 < low < high < 1e30 else "it has no range of scores, or no labels"

    def scale(self, task: Task) -> tuple[float, float]:
        return task.score_range

    def parse(self, task: Task, table: Table) -> npt.NDArray[np.float32]:
        values = table.columns[task.label]
        low, high = task.score_range
        try:
            scores = np.array(values, dtype=np.float64)
        except ValueError:
            scores = np.array([as_number(value) for value in values])
        fits = (scores >= low) & (scores <= high)
        if not fits.all():
            row = int(np.argmin(fits))
            what = "is not a number" if np.isnan(scores[row]) else f"lies outside {low:g} to {high:g}"
            what += " (decimals have a point here, no comma)" if "," in values[row] else ""
            raise DataError(
                f"{table.location(row)}: score {values[row]!r} in column {task.label} {what}; "
                f"mend the row, or write another range under tasks.{task.name}.score_range"
            ).coded("score_invalid", task.name, table.number(row))
        return ((scores - low) / (high - low)).astype(np.float32)

    def groups(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The quantile that each score falls into; equal scores share one."""
        if not len(labels):
            return np.zeros(0, dtype=np.int64)
        edges = np.quantile(labels.astype(np.float64), np.arange(1, SCORE_BINS) / SCORE_BINS)
        return np.searchsorted(edges, labels.astype(np.float64), side="right").astype(np.int64)

    def count_names(self, task: Task) -> list[str]:
        low, high = task.score_range
        edges = np.linspace(0.0, 1.0, SCORE_RANGES + 1)
        return [f"{low + (high - low) * a:.1f}-{low + (high - low) * b:.1f}" for a, b in pairwise(edges)]

    def counts(self, task: Task, labels: npt.NDArray[Any]) -> list[int]:
        counts, _ = np.histogram(labels, bins=np.linspace(0.0, 1.0, SCORE_RANGES + 1))
        return [int(count) for count in counts]

    def quantiles(self, task: Task, labels: npt.NDArray[Any]) -> list[float]:
        low, high = task.score_range
        return [round(low + (high - low) * float(q), 4) for q in np.quantile(labels, [0, 0.25, 0.5, 0.75, 1])]

    def num_outputs(self, task: Task) -> int:
        return 1

    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        """Squared error of the scaled score."""
        from torch.nn import functional as F

        return F.mse_loss(outputs.squeeze(-1), labels.to(outputs.dtype), reduction="none")

    def plain_losses(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        errors: npt.NDArray[Any] = (outputs[:, 0] - labels) ** 2
        return errors

    def answer(self, task: Task, outputs: npt.NDArray[Any], texts: Sequence[str] = ()) -> Answer:
        return Answer(score=float(_in_range(task, outputs)[0]))

    def sum_outputs(
        self,
        task: Task,
        outputs: npt.NDArray[np.float64],
        labels: npt.NDArray[Any],
        loss: float,
        *,
        keep_pairs: bool,
        broken: int,
    ) -> RegressionSums:
        return _sum_scores(task, outputs[:, 0], labels, loss, keep_pairs, broken)

    def read_sums(self, task: Task, data: Mapping[str, Any], *, with_pairs: bool) -> RegressionSums:
        sums = RegressionSums.from_dict(data)
        if sums.pairs is not None and not with_pairs:
            raise WireError(f"evaluation sums: predictions with labels of task {task.name}, which were not requested")
        if not _is_within(task, sums):
            raise WireError(f"evaluation sums: labels outside the score_range of task {task.name}")
        return sums

    def sums_to_numbers(self, task: Task, sums: RegressionSums) -> npt.NDArray[np.float64]:
        """Moments about the middle of the score's range and in its units, so that none is larger than the examples."""
        prediction, score = (_from_middle(task, mean) for mean in (sums.mean_prediction, sums.mean_score))
        unit, count = _width(task), sums.count
        moments = [
            count * prediction,
            count * score,
            sums.spread_prediction / unit**2 + count * prediction**2,
            sums.spread_score / unit**2 + count * score**2,
            sums.spread_both / unit**2 + count * prediction * score,
            sums.squared_error / unit**2,
            sums.absolute_error / unit,
        ]
        return np.array([count, sums.broken, sums.loss, *moments, *sums.residuals], dtype=np.float64)

    def sums_from_numbers(self, task: Task, numbers: npt.NDArray[np.float64]) -> RegressionSums:
        """Of the ranges only the constant ones are known: another one is taken for the whole range of scores."""
        count, broken = round(numbers[0]), round(numbers[1])
        prediction, score, prediction_square, score_square, both = numbers[3:8] / max(1, count)
        unit, (low, high) = _width(task), task.score_range
        middle = (low + high) / 2
        spreads = [
            max(0.0, float(square - mean**2)) * count * unit**2
            for square, mean in ((prediction_square, prediction), (score_square, score))
        ]
        means = [middle + unit * float(mean) for mean in (prediction, score)]
        least = max(_ROUNDED, count * _SAME**2) * unit**2
        ranges = [
            None if not count else (low, high) if spread > least else (mean, mean)
            for spread, mean in zip(spreads, means, strict=True)
        ]
        return RegressionSums(
            count=count,
            mean_prediction=means[0] if count else 0.0,
            mean_score=means[1] if count else 0.0,
            spread_prediction=spreads[0],
            spread_score=spreads[1],
            spread_both=float(both - prediction * score) * count * unit**2,
            squared_error=float(numbers[8]) * unit**2,
            absolute_error=float(numbers[9]) * unit,
            range_prediction=ranges[0],
            range_score=ranges[1],
            residuals=np.rint(numbers[10:]).astype(np.int64),
            loss=float(numbers[2]),
            broken=broken,
        )

    def score(self, task: Task, sums: RegressionSums) -> tuple[dict[str, Value], str | None]:
        if sums.count == 0:
            return dict.fromkeys(self.metrics, "no examples"), None
        constant_predictions = _is_constant(task, sums.range_prediction)
        constant_scores = _is_constant(task, sums.range_score)
        mse = sums.squared_error / sums.count
        constant = "all predictions are equal" if constant_predictions else "all labels are equal"
        is_constant = constant_predictions or constant_scores
        values: dict[str, Value] = {
            "pearson": constant if is_constant else _pearson(sums),
            "spearman": constant if is_constant else _spearman(sums),
            "mse": mse,
            "rmse": math.sqrt(mse),
            "mae": sums.absolute_error / sums.count,
            "r2": "all labels are equal"
            if constant_scores or not sums.spread_score
            else 1 - sums.squared_error / sums.spread_score,
        }
        # A constant can never beat the mean, whatever the rounding says. Predictions off in scale alone, which
        # correlate well, are another matter: r2 shows it.
        pearson = values["pearson"]
        follows = isinstance(pearson, float) and pearson >= FOLLOWS
        no_better = constant_predictions or (mse >= sums.spread_score / sums.count and not follows)
        return values, MEAN if no_better else None

    def evaluation_fields(self, task: Task, sums: RegressionSums) -> dict[str, Any]:
        from fedmtl.runs.events import Residuals

        residuals = Residuals(edges=residual_edges(task).tolist(), counts=sums.residuals.tolist())
        return {"moments": sums.moments(), "residuals": residuals}

    def outputs_for(self, task: Task, labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.asarray(labels, dtype=np.float64)[:, None]

    def plain_head(self, task: Task, weight: Tensor, bias: Tensor) -> PlainHead:
        """Rescaled from 0..1 to the score's range."""
        low, high = task.score_range
        return PlainHead(weight * (high - low), bias * (high - low) + low, "regression", ("score",))


def residual_edges(task: Task) -> Floats:
    """The 21 edges of the residuals' histogram: from minus to plus the score's range."""
    low, high = task.score_range
    return np.linspace(low - high, high - low, RESIDUAL_BINS + 1)


def _width(task: Task) -> float:
    low, high = task.score_range
    return high - low


def _from_middle(task: Task, value: float) -> float:
    """A score's place between minus and plus a half."""
    low, high = task.score_range
    return (value - (low + high) / 2) / (high - low)


def _in_range(task: Task, scaled: npt.NDArray[Any]) -> Floats:
    """Outputs in the score's units; one beyond the lowest or highest score is that score."""
    low, high = task.score_range
    return low + (high - low) * np.clip(scaled.astype(np.float64), 0.0, 1.0)


def _sum_scores(
    task: Task, scaled: Floats, labels: npt.NDArray[Any], loss: float, keep_pairs: bool, broken: int
) -> RegressionSums:
    low, high = task.score_range
    predictions = _in_range(task, scaled)
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


def _range(values: Any) -> tuple[float, float] | None:
    if values is None:
        return None
    low, high = map(read_moment, read_list(values))
    return low, high


def _pairs(values: Any) -> tuple[Floats, Floats]:
    predictions, scores = (
        np.array([read_moment(value) for value in read_list(part)], np.float64) for part in read_list(values)
    )
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


def _is_constant(task: Task, span: tuple[float, float] | None) -> bool:
    low, high = task.score_range
    return span is None or span[1] - span[0] <= _SAME * (high - low)


def _pearson(sums: RegressionSums) -> Value:
    # Two roots: the product of two tiny spreads would be 0.
    scale = math.sqrt(sums.spread_prediction) * math.sqrt(sums.spread_score)
    return max(-1.0, min(1.0, sums.spread_both / scale)) if scale else "too close to constant"


def _spearman(sums: RegressionSums) -> Value:
    if sums.pairs is None:
        return NEEDS_PAIRS
    predictions, scores = (ranks - ranks.mean() for ranks in map(_ranks, sums.pairs))
    scale = math.sqrt(float(predictions @ predictions)) * math.sqrt(float(scores @ scores))
    return max(-1.0, min(1.0, float(predictions @ scores) / scale)) if scale else "too close to constant"


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values at the mean of theirs; with a value that is not a number there are none."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return np.full_like(ranks, np.nan) if np.isnan(values).any() else ranks
