"""Classification: one of several labels, by cross-entropy of one output for each or, for two, of one output (BCE).

`LabelledKind` is all that follows from an example having one of a list of labels, whatever the outputs are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedmtl.config import TaskConfig
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask
from fedmtl.tasks.kinds.protocol import Answer, PlainHead, TaskKind, Value, wrong_outputs
from fedmtl.tasks.metrics import MOST_EXAMPLES, Counts, not_those_of, read_count, read_list, read_loss
from fedmtl.tasks.sources import Table

if TYPE_CHECKING:
    from torch import Tensor

    from fedmtl.tasks.task import Task

MAJORITY = "equals the majority class"
CONSTANT = "gives one label to all"
MOST_LABELS_SHOWN = 12
# A head is as wide as there are labels.
MOST_LABELS = 100_000


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
        with not_those_of("a classification"):
            rows = [[read_count(value) for value in read_list(row)] for row in read_list(data["confusion"])]
            sums = cls(np.array(rows, dtype=np.int64), read_loss(data["loss"]), read_count(data["broken"]))
        if not rows or any(len(row) != len(rows) for row in rows) or sum(map(sum, rows)) >= MOST_EXAMPLES:
            raise WireError("evaluation sums: the confusion counts are not a square of counts")
        return sums


class LabelledKind(TaskKind):
    """A kind whose examples have one of a list of labels.

    What is left to say is `num_outputs`, `losses` and `probabilities`.
    """

    metrics = ("accuracy", "f1", "matthews")
    main_metrics = ("accuracy", "f1", "matthews")
    has_labels = True

    @abstractmethod
    def probabilities(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Every label's probability by each row of outputs, (n, outputs) to (n, labels)."""

    def labels(self, name: str, given: TaskConfig, defaults: BuiltinTask, found: Sequence[str] = ()) -> tuple[str, ...]:
        if given.labels and len(given.labels) < 2:
            raise ConfigError(f"tasks.{name}.labels: found {given.labels}, write two labels or more")
        return tuple(given.labels or defaults.labels or found)

    def checked_class_weights(
        self, name: str, given: TaskConfig, labels: Sequence[str]
    ) -> Literal["none", "balanced"] | tuple[float, ...]:
        weights = given.class_weights
        if not isinstance(weights, list):
            return weights
        if labels and len(weights) != len(labels):
            raise ConfigError(
                f"tasks.{name}.class_weights: found {len(weights)} weights for {len(labels)} labels, write one for"
                f" each of {', '.join(labels)}"
            )
        return tuple(weights)

    def problem(self, task: Task) -> str | None:
        fits = 2 <= len(task.labels) <= MOST_LABELS
        return None if fits else "it has no range of scores, or no labels"

    def parse(self, task: Task, table: Table) -> npt.NDArray[np.int64]:
        """A built-in task's label may be written as its name or its index from 0."""
        known = {label: index for index, label in enumerate(task.labels)}
        # An index must not be mistaken for a label that is itself a number.
        by_index = task.name in BUILTIN and not any(label.isdigit() for label in task.labels)
        if by_index:
            known |= {str(index): index for index in range(len(task.labels))}
        values = table.columns[task.label]
        classes = np.array([known.get(value, -1) for value in values], dtype=np.int64)
        if (classes < 0).any():
            row = int(np.argmax(classes < 0))
            more = ", ..." if len(task.labels) > MOST_LABELS_SHOWN else ""
            indices = f" (or 0 to {len(task.labels) - 1})" if by_index else ""
            raise DataError(
                f"{table.location(row)}: label {values[row]!r} in column {task.label} is not one of"
                f" {', '.join(task.labels[:MOST_LABELS_SHOWN])}{more}{indices}"
                f"; mend the row, or list every label under tasks.{task.name}.labels"
            ).coded("label_unknown", task.name, table.number(row))
        return classes

    def groups(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return labels

    def count_names(self, task: Task) -> list[str]:
        return list(task.labels)

    def counts(self, task: Task, labels: npt.NDArray[Any]) -> list[int]:
        return [int(count) for count in np.bincount(labels, minlength=len(task.labels))]

    def class_weights(self, task: Task, labels: npt.NDArray[Any]) -> npt.NDArray[np.float32] | None:
        """Return the loss weight of each label: as configured, or n / (classes * count) with these labels' counts."""
        if task.class_weights == "none":
            return None
        if task.class_weights != "balanced":
            return np.asarray(task.class_weights, dtype=np.float32)
        counts = np.bincount(labels, minlength=len(task.labels))
        # A label this client does not have is never looked up; 1 keeps the division whole.
        return (len(labels) / (len(task.labels) * np.maximum(counts, 1))).astype(np.float32)

    def answer(self, task: Task, outputs: npt.NDArray[Any], texts: Sequence[str] = ()) -> Answer:
        shares = dict(zip(task.labels, self.probabilities(task, outputs[None])[0].tolist(), strict=True))
        return Answer(max(shares, key=lambda label: shares[label]), None, shares)

    def predicted(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        labels: npt.NDArray[np.int64] = self.probabilities(task, outputs).argmax(axis=1)
        return labels

    def sum_outputs(
        self,
        task: Task,
        outputs: npt.NDArray[np.float64],
        labels: npt.NDArray[Any],
        loss: float,
        *,
        keep_pairs: bool,
        broken: int,
    ) -> ClassificationSums:
        return _count_predictions(task, self.predicted(task, outputs), labels, loss, broken)

    def read_sums(self, task: Task, data: Mapping[str, Any], *, with_pairs: bool) -> ClassificationSums:
        sums = ClassificationSums.from_dict(data)
        if len(sums.confusion) != len(task.labels):
            raise WireError(
                f"evaluation sums: {len(sums.confusion)} labels, task {task.name} has {len(task.labels)};"
                " give client and server the same labels"
            )
        return sums

    def sums_to_numbers(self, task: Task, sums: ClassificationSums) -> npt.NDArray[np.float64]:
        return np.array([*sums.confusion.reshape(-1), sums.loss, sums.broken], dtype=np.float64)

    def sums_from_numbers(self, task: Task, numbers: npt.NDArray[np.float64]) -> ClassificationSums:
        width = len(task.labels)
        cells = np.rint(numbers[:-2]).astype(np.int64).reshape(width, width)
        return ClassificationSums(cells, float(numbers[-2]), round(numbers[-1]))

    def score(self, task: Task, sums: ClassificationSums) -> tuple[dict[str, Value], str | None]:
        # Python's integers: products of four counts overflow 64 bits at some ten thousand examples.
        confusion: list[list[int]] = sums.confusion.tolist()
        true = [sum(row) for row in confusion]
        predicted = [sum(column) for column in zip(*confusion, strict=True)]
        correct = [confusion[label][label] for label in range(len(confusion))]
        total = sum(true)
        if total == 0:
            return dict.fromkeys(self.metrics, "no examples"), None
        values: dict[str, Value] = {
            "accuracy": sum(correct) / total,
            "f1": _f1(task, true, predicted, correct),
            "matthews": _matthews(task, true, predicted, correct),
        }
        if sum(correct) == max(true):
            return values, MAJORITY
        return values, CONSTANT if max(predicted) == total else None

    def constant_score(self, task: Task, labels: npt.NDArray[Any]) -> float:
        """The main metric of the commonest label."""
        if not len(labels):
            return 0.0
        commonest = np.full(len(labels), np.bincount(labels, minlength=len(task.labels)).argmax())
        value = self.score(task, _count_predictions(task, commonest, labels, 0.0, 0))[0][task.metric]
        return 0.0 if isinstance(value, str) else value

    def evaluation_fields(self, task: Task, sums: ClassificationSums) -> dict[str, Any]:
        return {"confusion": sums.confusion.tolist()}


class Classification(LabelledKind):
    """One output for each label, as logits; with `outputs: 1` one for two labels, as the second's logit."""

    name = "classification"

    def outputs(self, name: str, given: TaskConfig, labels: Sequence[str]) -> int:
        width = len(labels) or 2
        if given.outputs is None or given.outputs == width or (given.outputs == 1 and width == 2):
            return given.outputs or width
        raise wrong_outputs(name, given, f"{width} classes")

    def problem(self, task: Task) -> str | None:
        if task.outputs not in (1, 2, len(task.labels)):
            return "a head has one output or two"
        if task.outputs == 1 and len(task.labels) != 2:
            return "one output is for two labels"
        return super().problem(task)

    def num_outputs(self, task: Task) -> int:
        return 1 if task.outputs == 1 else len(task.labels)

    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, of one output the binary one."""
        from torch.nn import functional as F

        if task.outputs == 1:
            return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), labels.to(outputs.dtype), reduction="none")
        return F.cross_entropy(outputs, labels, reduction="none")

    def plain_losses(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        logits = _two_logits(task, outputs)
        surprise: npt.NDArray[Any] = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]
        return surprise

    def label_offsets(
        self, task: Task, labels: npt.NDArray[Any], everybody: Sequence[int], strength: float
    ) -> npt.NDArray[np.float32]:
        """The log of each label's share here over its share everywhere; every label counts once more than it occurs."""
        here, everywhere = np.ones(len(task.labels)), np.ones(len(task.labels))
        here += np.bincount(labels, minlength=len(here))
        everywhere[: len(everybody)] += everybody
        offsets = strength * (np.log(here / here.sum()) - np.log(everywhere / everywhere.sum()))
        # One output for two labels is how far the second is above the first.
        return np.asarray(offsets[1:] - offsets[:1] if task.outputs == 1 else offsets, np.float32)

    def divergences(self, task: Task, first: Tensor, second: Tensor) -> Tensor:
        """The Kullback-Leibler divergence both ways."""
        from torch.nn import functional as F

        if task.outputs == 1:
            return ((first.sigmoid() - second.sigmoid()) * (first - second)).squeeze(-1)
        logs, others = F.log_softmax(first, -1), F.log_softmax(second, -1)
        return ((logs.exp() - others.exp()) * (logs - others)).sum(-1)

    def distillation_loss(self, task: Task, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """T^2 KL(teacher || student) at that temperature: T^2 keeps the gradient's size as the temperature grows."""
        import torch
        from torch.nn import functional as F

        if task.outputs == 1:
            teacher, student = (torch.cat([torch.zeros_like(part), part], -1) for part in (teacher, student))
        target, log_shares = F.log_softmax(teacher / temperature, -1), F.log_softmax(student / temperature, -1)
        return temperature**2 * F.kl_div(log_shares, target, reduction="batchmean", log_target=True)

    def in_form_of(self, student: Task, teacher: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One logit is the difference of two."""
        if self.num_outputs(student) == self.num_outputs(teacher):
            return outputs
        return np.diff(outputs, axis=1) if student.outputs == 1 else _two_logits(teacher, outputs)

    def probabilities(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.array([_softmax(row) for row in _two_logits(task, outputs).tolist()])

    def predicted(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return (outputs[:, 0] > 0).astype(np.int64) if outputs.shape[1] == 1 else outputs.argmax(axis=1)

    def outputs_for(self, task: Task, labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        if task.outputs == 1:
            return np.where(labels[:, None] == 1, 1.0, -1.0)
        return np.asarray(np.eye(len(task.labels))[labels.astype(np.int64)])

    def plain_head(self, task: Task, weight: Tensor, bias: Tensor) -> PlainHead:
        """A head of one output becomes one of two, (0, z): their softmax is the sigmoid of z."""
        import torch

        if task.outputs == 1:
            weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
        return PlainHead(weight, bias, "single_label_classification", task.labels)


def _two_logits(task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of logits, one for each label: a single output z is (0, z)."""
    return np.concatenate([np.zeros_like(outputs), outputs], axis=1) if task.outputs == 1 else outputs


def _softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    exponents = [math.exp(value - top) for value in logits]
    return [value / sum(exponents) for value in exponents]


def _count_predictions(
    task: Task, predicted: npt.NDArray[Any], labels: npt.NDArray[Any], loss: float, broken: int
) -> ClassificationSums:
    num_labels = len(task.labels)
    cells = np.bincount(labels.astype(np.int64) * num_labels + predicted, minlength=num_labels**2)
    return ClassificationSums(cells.astype(np.int64).reshape(num_labels, num_labels), float(loss), broken)


def _f1(task: Task, true: list[int], predicted: list[int], correct: list[int]) -> Value:
    """Of the second label for two, else the mean over the labels that occur, true or predicted."""
    labels = [1] if len(true) == 2 else range(len(true))
    each = [2 * correct[n] / (true[n] + predicted[n]) for n in labels if true[n] + predicted[n]]
    return math.fsum(each) / len(each) if each else f"`{task.labels[1]}` is neither a label nor a prediction"


def _matthews(task: Task, true: list[int], predicted: list[int], correct: list[int]) -> Value:
    """Gorodkin's coefficient for any number of labels; for two it is Matthews's."""
    total = sum(true)
    for what, counts in (("predictions", predicted), ("labels", true)):
        if max(counts) == total:
            return f"all {what} are `{task.labels[counts.index(total)]}`"
    covariance = total * sum(correct) - sum(t * p for t, p in zip(true, predicted, strict=True))
    of_true = total**2 - sum(t * t for t in true)
    of_predicted = total**2 - sum(p * p for p in predicted)
    return covariance / math.sqrt(of_true * of_predicted)
