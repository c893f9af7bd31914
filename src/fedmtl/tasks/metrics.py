"""Metrics from sums. What is not defined is None with a reason, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedmtl.tasks.sums import ClassificationSums, RegressionSums, Sums, residual_edges, sum_predictions, sums_from_dict
from fedmtl.tasks.task import Task

if TYPE_CHECKING:
    # Workers score, and write no events.
    from fedmtl.runs.events import EvaluationEvent

__all__ = [
    "ClassificationSums",
    "RegressionSums",
    "Scores",
    "Sums",
    "averages",
    "constant_score",
    "evaluation_event",
    "score",
    "sum_predictions",
    "sums_from_dict",
]

NEEDS_PAIRS = "needs pairs of prediction and label; set evaluation.share_pairs"
MAJORITY = "equals the majority class"
CONSTANT = "gives one label to all"
MEAN = "no better than the mean prediction"
# From this correlation on, predictions know something that their mean does not.
FOLLOWS = 0.1
# Two passes over one text differ by this share of the range when padded differently: no difference.
_SAME = 1e-6

# A metric's value, or the reason why it has none.
_Value = float | str


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
    values, marked = (
        _score_classes(task, sums) if isinstance(sums, ClassificationSums) else _score_regression(task, sums)
    )
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
    accuracy = [(task, "accuracy") for task in counted if not task.is_regression]
    return _mean(main, scores), _mean(accuracy, scores)


def constant_score(task: Task, labels: np.ndarray) -> float:
    """The main metric of an answer that is always the commonest class; 0 where that, as a score's, is undefined."""
    if task.is_regression or not len(labels):
        return 0.0
    commonest = int(np.bincount(labels, minlength=len(task.labels)).argmax())
    outputs = np.zeros((len(labels), len(task.labels)), dtype=np.float32)
    outputs[:, commonest] = 1.0
    # One logit stands for (0, z).
    given = outputs[:, 1:] - outputs[:, :1] if task.outputs == 1 else outputs
    return score(task, sum_predictions(task, given, labels, 0.0, False)).metrics[task.metric] or 0.0


def evaluation_event(
    round_number: int, task: Task, sums: Sums, clients: Mapping[str, float | None] | None = None
) -> EvaluationEvent:
    """The `evaluation` event of a task; `clients` has their main metrics where it was scored at clients."""
    from fedmtl.runs.events import EvaluationEvent, Residuals

    scores = score(task, sums)
    confusion = moments = residuals = None
    if isinstance(sums, ClassificationSums):
        confusion = sums.confusion.tolist()
    else:
        moments = sums.moments()
        residuals = Residuals(edges=residual_edges(task).tolist(), counts=sums.residuals.tolist())
    return EvaluationEvent(
        round=round_number,
        task=task.name,
        metrics=scores.metrics,
        undefined=scores.undefined,
        loss=scores.loss,
        examples=scores.examples,
        marked=scores.marked,
        confusion=confusion,
        moments=moments,
        residuals=residuals,
        clients=None if clients is None else dict(clients),
    )


def _mean(wanted: Sequence[tuple[Task, str]], scores: Mapping[str, Scores]) -> float | None:
    values = [scores[task.name].metrics.get(metric) if task.name in scores else None for task, metric in wanted]
    defined = [value for value in values if value is not None]
    return math.fsum(defined) / len(defined) if defined and len(defined) == len(values) else None


def _score_classes(task: Task, sums: ClassificationSums) -> tuple[dict[str, _Value], str | None]:
    # Python's integers: products of four counts overflow 64 bits at some ten thousand examples.
    confusion: list[list[int]] = sums.confusion.tolist()
    true = [sum(row) for row in confusion]
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    correct = [confusion[label][label] for label in range(len(confusion))]
    total = sum(true)
    if total == 0:
        return dict.fromkeys(("accuracy", "f1", "matthews"), "no examples"), None
    values: dict[str, _Value] = {
        "accuracy": sum(correct) / total,
        "f1": _f1(task, true, predicted, correct),
        "matthews": _matthews(task, true, predicted, correct),
    }
    if sum(correct) == max(true):
        return values, MAJORITY
    return values, CONSTANT if max(predicted) == total else None


def _f1(task: Task, true: list[int], predicted: list[int], correct: list[int]) -> _Value:
    """Of the second label for two, else the mean over the labels that occur, true or predicted."""
    labels = [1] if len(true) == 2 else range(len(true))
    each = [2 * correct[n] / (true[n] + predicted[n]) for n in labels if true[n] + predicted[n]]
    return math.fsum(each) / len(each) if each else f"`{task.labels[1]}` is neither a label nor a prediction"


def _matthews(task: Task, true: list[int], predicted: list[int], correct: list[int]) -> _Value:
    """Gorodkin's coefficient for any number of labels; for two it is Matthews's."""
    total = sum(true)
    for what, counts in (("predictions", predicted), ("labels", true)):
        if max(counts) == total:
            return f"all {what} are `{task.labels[counts.index(total)]}`"
    covariance = total * sum(correct) - sum(t * p for t, p in zip(true, predicted, strict=True))
    of_true = total**2 - sum(t * t for t in true)
    of_predicted = total**2 - sum(p * p for p in predicted)
    return covariance / math.sqrt(of_true * of_predicted)


def _score_regression(task: Task, sums: RegressionSums) -> tuple[dict[str, _Value], str | None]:
    names = ("pearson", "spearman", "mse", "rmse", "mae", "r2")
    if sums.count == 0:
        return dict.fromkeys(names, "no examples"), None
    constant_predictions = _is_constant(task, sums.range_prediction)
    constant_scores = _is_constant(task, sums.range_score)
    mse = sums.squared_error / sums.count
    constant = "all predictions are equal" if constant_predictions else "all labels are equal"
    is_constant = constant_predictions or constant_scores
    values: dict[str, _Value] = {
        "pearson": constant if is_constant else _pearson(sums),
        "spearman": constant if is_constant else _spearman(sums),
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": sums.absolute_error / sums.count,
        "r2": "all labels are equal"
        if constant_scores or not sums.spread_score
        else 1 - sums.squared_error / sums.spread_score,
    }
    # A constant can never beat the mean, whatever the rounding says. Predictions off in scale alone, which correlate
    # well, are another matter: r2 shows it.
    pearson = values["pearson"]
    follows = isinstance(pearson, float) and pearson >= FOLLOWS
    no_better = constant_predictions or (mse >= sums.spread_score / sums.count and not follows)
    return values, MEAN if no_better else None


def _is_constant(task: Task, span: tuple[float, float] | None) -> bool:
    low, high = task.score_range
    return span is None or span[1] - span[0] <= _SAME * (high - low)


def _pearson(sums: RegressionSums) -> _Value:
    # Two roots: the product of two tiny spreads would be 0.
    scale = math.sqrt(sums.spread_prediction) * math.sqrt(sums.spread_score)
    return max(-1.0, min(1.0, sums.spread_both / scale)) if scale else "too close to constant"


def _spearman(sums: RegressionSums) -> _Value:
    if sums.pairs is None:
        return NEEDS_PAIRS
    predictions, scores = (ranks - ranks.mean() for ranks in map(_ranks, sums.pairs))
    scale = math.sqrt(float(predictions @ predictions)) * math.sqrt(float(scores @ scores))
    return max(-1.0, min(1.0, float(predictions @ scores) / scale)) if scale else "too close to constant"


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values at the mean of theirs; with a value that is not a number there are none."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return np.full_like(ranks, np.nan) if np.isnan(values).any() else ranks
