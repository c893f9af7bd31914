"""Multilabel: any number of a list of labels for each text, or none, by binary cross-entropy of an output for each.

A label is answered where its probability is above its threshold: a fixed one while a model trains, and one for each
label that is fitted on validation once it is finished (Lipton et al. 2014, Optimal Thresholding of Classifiers to
Maximize F1 Measure). The loss of an example is the sum over its labels, which is as large as a classification's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedmtl.config import TaskConfig
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.foreign import excerpt, parse_json, printable
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask
from fedmtl.tasks.kinds.protocol import Answer, PlainHead, TaskKind, Value
from fedmtl.tasks.metrics import MOST_EXAMPLES, Counts, not_those_of, read_count, read_list, read_loss
from fedmtl.tasks.sources import Table, as_number, as_text, file_text, parquet_file

if TYPE_CHECKING:
    from torch import Tensor

    from fedmtl.tasks.task import Task

NOTHING_FOUND = "finds nothing"
# What a probability has to be above while a model trains, and where nothing was fitted.
THRESHOLD = 0.3
# A label with fewer examples in validation has the threshold that is best for all labels together.
RARE = 20
FITTED = np.arange(1, 100) / 100
# Thresholds at which predictions are counted for the curves of the report, and the most labels that have some.
DRAWN = np.arange(1, 20) / 20
MOST_DRAWN = 100
MOST_LABELS = 10_000
MOST_LABELS_SHOWN = 12
SEPARATORS = (",", ";", "|")
# The values of a column that says whether a text has one label.
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
# A column with as many flags among its values is one of flags, and the others are mistakes.
FLAGGED = 0.9
MOST_SHOWN = 40
LINES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class LabelTable(Table):
    """A table whose label column has JSON lists; `flags` are the columns that it is made of, where there are such."""

    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labelled(Answer):
    """The labels whose probabilities are above their thresholds, the most probable first."""

    labels: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"labels": list(self.labels), "probabilities": dict(self.probabilities)}

    def cells(self) -> dict[str, Any]:
        return {"": list(self.labels), **self.probabilities}

    def scored(self) -> dict[str, Any]:
        least = min((self.probabilities[label] for label in self.labels), default=None)
        return {"answer": _written(self.labels), "probability": least, "probabilities": json.dumps(self.probabilities)}

    def lines(self, text: str, *, coloured: bool) -> list[str]:
        found = (f"{printable(label)} ({self.probabilities[label]:.3f})" for label in self.labels)
        return [", ".join(found) or "no label"]


@dataclass(frozen=True, eq=False)
class MultilabelSums:
    """For each label, of how many texts it is true, predicted and both; how many texts have all labels right.

    `drawn` counts predicted and right ones of each label at the thresholds DRAWN, of which it has none for more than
    MOST_DRAWN labels. `broken` counts texts whose outputs were not finite; nothing else of them is counted.
    """

    counts: Counts
    whole: int
    texts: int
    loss: float
    broken: int = 0
    drawn: Counts = field(default_factory=lambda: np.zeros((0, 0, 2), np.int64))

    @property
    def examples(self) -> int:
        return self.texts + self.broken

    def __add__(self, other: MultilabelSums) -> MultilabelSums:
        assert self.counts.shape == other.counts.shape, "sums of one task have one shape"
        whole, texts, loss = self.whole + other.whole, self.texts + other.texts, self.loss + other.loss
        broken, drawn = self.broken + other.broken, self.drawn + other.drawn
        return MultilabelSums(self.counts + other.counts, whole, texts, loss, broken, drawn)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "counts": self.counts.tolist(), "drawn": self.drawn.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MultilabelSums:
        """The sums again, bit for bit; a WireError where no predictions can have them."""
        with not_those_of("a multilabel"):
            rows = [[read_count(value) for value in read_list(row)] for row in read_list(data["counts"])]
            whole, texts, broken = (read_count(data[name]) for name in ("whole", "texts", "broken"))
            counts = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
            sums = cls(counts, whole, texts, read_loss(data["loss"]), broken, _read_drawn(data["drawn"]))
        if counts.shape != (len(rows), 3) or texts + broken >= MOST_EXAMPLES:
            raise WireError("evaluation sums: the counts are not three for each label")
        true, predicted, right = counts.T
        # Python's integers: thousands of labels times the examples may be more than 64 bits have.
        wrong = sum((true + predicted - 2 * right).tolist())
        is_possible = (right <= np.minimum(true, predicted)).all() and (true + predicted - right <= texts).all()
        # A text that is not right as a whole has a wrong label, and not more of them than there are.
        if not is_possible or whole > texts or not texts - whole <= wrong <= (texts - whole) * len(rows):
            raise WireError("evaluation sums: no predictions have these counts of labels")
        if sums.drawn.size and not _can_be_drawn(sums.drawn, true, texts):
            raise WireError("evaluation sums: no predictions have these counts by threshold")
        return sums


class Multilabel(TaskKind):
    """An output for each of `Task.labels`, whose logistic function is the label's probability.

    Labels of examples are rows of 0 and 1. `Task.fitted` has a threshold for each label.
    """

    name = "multilabel"
    metrics = ("f1", "macro_f1", "subset_accuracy", "precision", "recall")
    main_metrics = ("f1", "macro_f1", "subset_accuracy")
    has_labels = True
    several_labels = True
    stacks = False
    columns = (("text",), "labels")

    def blank_labels(self, count: int) -> npt.NDArray[Any]:
        return np.zeros(count, np.uint8).view(_Blank)

    # -- from a config to a task --------------------------------------------------------------------------------------

    def labels(self, name: str, given: TaskConfig, defaults: BuiltinTask, found: Sequence[str] = ()) -> tuple[str, ...]:
        return tuple(given.labels or defaults.labels or found)

    def checked_class_weights(
        self, name: str, given: TaskConfig, labels: Sequence[str]
    ) -> Literal["none", "balanced"] | tuple[float, ...]:
        if given.class_weights != "none":
            raise ConfigError(
                f"tasks.{name}.class_weights: found on {self.words}, whose labels all count alike; write `none` or"
                " remove it: thresholds are fitted to rare labels"
            )
        return "none"

    def problem(self, task: Task) -> str | None:
        fits = 1 <= len(task.labels) <= MOST_LABELS and len(set(task.labels)) == len(task.labels)
        fits &= task.outputs == 2 and len(task.fitted) in (0, len(task.labels))
        return None if fits and all(0 <= each <= 1 for each in task.fitted) else "its labels or thresholds do not fit"

    # -- sources ------------------------------------------------------------------------------------------------------

    def read_file(self, task: Task, path: Path, delimiter: str | None = None) -> Table:
        name = path.name.lower()
        if delimiter is None and path.is_file() and name.endswith(LINES):
            return _read_lines(task, path, super().read_file(task, path))
        if delimiter is None and path.is_file() and name.endswith(".parquet"):
            columns, names = parquet_file(path)
            return self.read_rows(task, columns, str(path), names)
        return _with_lists(task, super().read_file(task, path, delimiter))

    def read_rows(self, task: Task, columns: Mapping[str, Sequence[Any]], origin: str, names: Any = None) -> Table:
        known = names(task.label) if names else None
        table = Table({}, origin)
        for name, values in columns.items():
            is_label = name == task.label
            table.columns[name] = [
                _cell(value, f"{origin}, row {row}", known) if is_label else as_text(value)
                for row, value in enumerate(values, start=1)
            ]
        return _with_lists(task, table)

    def found_labels(self, task: Task, tables: Sequence[Table]) -> list[str]:
        lists = [_with_lists(task, table) for table in tables]
        flags = dict.fromkeys(name for table in lists for name in table.flags)
        found = {label for table in lists for cell in set(table.columns[task.label]) for label in json.loads(cell)}
        if not found:
            raise DataError(
                f"{tables[0].origin}: no text has a label; add some, or name another column under"
                f" tasks.{task.name}.label"
            ).coded("data_unusable", task.name)
        if flags:
            return list(flags)
        are_numbers = not any(math.isnan(as_number(label)) for label in found)
        return sorted(found, key=lambda label: (as_number(label) if are_numbers else 0.0, label))

    def labels_of_cell(self, cell: str) -> list[str]:
        return list(json.loads(cell))

    def parse(self, task: Task, table: Table) -> npt.NDArray[np.uint8]:
        """A built-in task's label may be written as its name or its index from 0."""
        table = _with_lists(task, table)
        if table.flags:
            _check_flags(task, table)
        known = {label: index for index, label in enumerate(task.labels)} | _indices(task)
        rows = np.zeros((len(table), len(task.labels)), np.uint8)
        for row, cell in enumerate(table.columns[task.label]):
            for label in json.loads(cell):
                if label not in known:
                    advice = _advice(label, known) or f"mend it, or list every label under tasks.{task.name}.labels"
                    raise DataError(
                        f"{table.location(row)}: label {excerpt(label)!r} in column {task.label} is not one of"
                        f" {_shown(task.labels)}; {advice}"
                    ).coded("label_unknown", task.name, table.number(row))
                rows[row, known[label]] = 1
        return rows

    # -- labels -------------------------------------------------------------------------------------------------------

    def groups(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rarest label of a text, from 1; 0 where it has none."""
        if not labels.size:
            return np.zeros(len(labels), np.int64)
        rarest_first = np.argsort(labels.sum(0, dtype=np.int64), kind="stable")
        first = labels[:, rarest_first].argmax(1)
        return np.where(labels.any(1), rarest_first[first] + 1, 0)

    def count_names(self, task: Task) -> list[str]:
        return list(task.labels)

    def counts(self, task: Task, labels: npt.NDArray[Any]) -> list[int]:
        """Of how many texts each label is: they add up to more than the texts where one has several."""
        return [int(count) for count in _rows(labels, len(task.labels)).sum(0, dtype=np.int64)]

    def written_label(self, task: Task, label: Any) -> str:
        return _written([task.labels[at] for at in np.flatnonzero(label)])

    # -- training -----------------------------------------------------------------------------------------------------

    def num_outputs(self, task: Task) -> int:
        return len(task.labels)

    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the labels."""
        from torch.nn import functional as F

        # Texts that are only to be answered have one zero each.
        true = labels.view(len(outputs), -1).to(outputs.dtype).expand_as(outputs)
        return F.binary_cross_entropy_with_logits(outputs, true, reduction="none").sum(-1)

    def plain_losses(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        losses: npt.NDArray[Any] = (np.logaddexp(0.0, outputs) - outputs * labels).sum(1)
        return losses

    def fitted(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Task:
        """The thresholds that give the best F1; a label with fewer than RARE examples has that of all together."""
        shares = _shares(outputs)
        is_true = labels > 0
        # (thresholds, labels), how many are predicted and how many of them are right.
        predicted, right = (
            np.stack([((shares > at) & mask).sum(0) for at in FITTED]) for mask in (np.ones_like(is_true), is_true)
        )
        true = is_true.sum(0)
        best = _best_thresholds(true, predicted, right)
        together = _best_thresholds(*(part.sum(-1, keepdims=True) for part in (true, predicted, right)))
        return replace(task, fitted=tuple(np.where(true < RARE, together, best).tolist()))

    def divergences(self, task: Task, first: Tensor, second: Tensor) -> Tensor:
        """The Kullback-Leibler divergence both ways, summed over the labels."""
        return ((first.sigmoid() - second.sigmoid()) * (first - second)).sum(-1)

    def distillation_loss(self, task: Task, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """T^2 KL(teacher || student) of every label at that temperature, summed over the labels."""
        from torch.nn import functional as F

        given, made = teacher / temperature, student / temperature
        share = given.sigmoid()
        here = share * (F.logsigmoid(given) - F.logsigmoid(made))
        absent = (1 - share) * (F.logsigmoid(-given) - F.logsigmoid(-made))
        return temperature**2 * (here + absent).sum(-1).mean()

    # -- answers and scores -------------------------------------------------------------------------------------------

    def answer(self, task: Task, outputs: npt.NDArray[Any], texts: Sequence[str] = ()) -> Labelled:
        shares = dict(zip(task.labels, _shares(outputs).tolist(), strict=True))
        chosen = [task.labels[at] for at in np.flatnonzero(self.predicted(task, outputs[None])[0])]
        return Labelled(probabilities=shares, labels=tuple(sorted(chosen, key=lambda label: -shares[label])))

    def predicted(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """For each row a row of 0 and 1, whether the label is answered."""
        return (_shares(outputs) > thresholds(task)).astype(np.int64)

    def sum_outputs(
        self,
        task: Task,
        outputs: npt.NDArray[np.float64],
        labels: npt.NDArray[Any],
        loss: float,
        *,
        keep_pairs: bool,
        broken: int,
    ) -> MultilabelSums:
        guess, true = self.predicted(task, outputs) > 0, _rows(labels, len(task.labels)) > 0
        counts = np.stack([true.sum(0), guess.sum(0), (true & guess).sum(0)], axis=1).astype(np.int64)
        whole = int((true == guess).all(axis=1).sum())
        return MultilabelSums(counts, whole, len(outputs), float(loss), broken, _drawn(_shares(outputs), true))

    def read_sums(self, task: Task, data: Mapping[str, Any], *, with_pairs: bool) -> MultilabelSums:
        sums = MultilabelSums.from_dict(data)
        if len(sums.counts) != len(task.labels):
            raise WireError(
                f"evaluation sums: {len(sums.counts)} labels, task {task.name} has {len(task.labels)};"
                " give client and server the same labels"
            )
        if sums.drawn.shape != _drawn_shape(task.labels):
            raise WireError("evaluation sums: what is predicted by threshold is not counted for each label")
        return sums

    def sums_to_numbers(self, task: Task, sums: MultilabelSums) -> npt.NDArray[np.float64]:
        counts = (*sums.counts.reshape(-1), *sums.drawn.reshape(-1))
        return np.array([*counts, sums.whole, sums.texts, sums.broken, sums.loss], np.float64)

    def sums_from_numbers(self, task: Task, numbers: npt.NDArray[np.float64]) -> MultilabelSums:
        many = np.rint(numbers[:-4]).astype(np.int64)
        counts, drawn = np.split(many, [3 * len(task.labels)])
        whole, texts, broken = (round(number) for number in numbers[-4:-1])
        shaped = drawn.reshape(_drawn_shape(task.labels))
        return MultilabelSums(counts.reshape(-1, 3), whole, texts, float(numbers[-1]), broken, shaped)

    def score(self, task: Task, sums: MultilabelSums) -> tuple[dict[str, Value], str | None]:
        if not sums.texts:
            return dict.fromkeys(self.metrics, "no examples"), None
        true, predicted, right = (int(count) for count in sums.counts.sum(0))
        each = [_f1(*row) for row in sums.counts.tolist() if row[0] + row[1]]
        values: dict[str, Value] = {
            "f1": _f1(true, predicted, right),
            "macro_f1": math.fsum(map(float, each)) / len(each) if each else NO_LABEL,
            "subset_accuracy": sums.whole / sums.texts,
            "precision": right / predicted if predicted else "no label is predicted",
            "recall": right / true if true else "the texts have no label",
        }
        return values, NOTHING_FOUND if not right else None

    def constant_score(self, task: Task, labels: npt.NDArray[Any]) -> float:
        """The main metric of the best set of labels that is answered to every text."""
        if not len(labels):
            return 0.0
        true = labels.sum(0, dtype=np.int64)
        if task.metric == "subset_accuracy":
            return float(np.unique(labels, axis=0, return_counts=True)[1].max() / len(labels))
        if task.metric == "macro_f1":
            each = [2 * count / (count + len(labels)) for count in true.tolist()]
            return math.fsum(each) / len(each)
        right = np.cumsum(np.sort(true)[::-1])
        return float((2 * right / (true.sum() + len(labels) * np.arange(1, len(true) + 1))).max())

    def evaluation_fields(self, task: Task, sums: MultilabelSums) -> dict[str, Any]:
        by_label: dict[str, dict[str, float | None]] = {}
        rows = zip(task.labels, sums.counts.tolist(), thresholds(task).tolist(), strict=True)
        for label, (true, predicted, right), threshold in rows:
            f1 = _f1(true, predicted, right)
            by_label[label] = {
                "f1": _known(f1),
                "precision": right / predicted if predicted else None,
                "recall": right / true if true else None,
                "true": true,
                "predicted": predicted,
                "right": right,
                "threshold": threshold,
            }
        return {"by_label": by_label, **_curves(task.labels, sums)}

    # -- export -------------------------------------------------------------------------------------------------------

    def plain_head(self, task: Task, weight: Tensor, bias: Tensor) -> PlainHead:
        return PlainHead(weight, bias, "multi_label_classification", task.labels)


NO_LABEL = "no label is true or predicted"


class _Blank(np.ndarray[Any, np.dtype[np.uint8]]):
    """A zero for each text that has no labels to be known: how many there could be is not, and others may follow."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.concatenate and any(not isinstance(part, _Blank) for part in args[0]):
            assert not any(isinstance(part, _Blank) and len(part) for part in args[0]), "rows of labels are not blank"
            return np.concatenate([part for part in args[0] if not isinstance(part, _Blank)], *args[1:], **kwargs)
        return super().__array_function__(func, types, args, kwargs)


def thresholds(task: Task) -> npt.NDArray[np.float64]:
    """What each label's probability has to be above."""
    return np.array(task.fitted or (THRESHOLD,) * len(task.labels), np.float64)


def _shares(outputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The logistic function, which overflows nowhere."""
    shares: npt.NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -outputs.astype(np.float64)))
    return shares


def _rows(labels: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    return labels if labels.ndim == 2 else np.zeros((len(labels), width), np.uint8)


def _f1(true: int, predicted: int, right: int) -> Value:
    return 2 * right / (true + predicted) if true + predicted else NO_LABEL


def _drawn_shape(labels: Sequence[str]) -> tuple[int, int, int]:
    return (len(DRAWN), len(labels), 2) if len(labels) <= MOST_DRAWN else (0, 0, 2)


def _drawn(shares: npt.NDArray[np.float64], true: npt.NDArray[np.bool_]) -> Counts:
    """How many of each label are predicted, and how many of them right, at each threshold of DRAWN."""
    if shares.shape[1] > MOST_DRAWN:
        return np.zeros((0, 0, 2), np.int64)
    above = [shares > at for at in DRAWN]
    return np.array([np.stack([each.sum(0), (each & true).sum(0)], axis=1) for each in above], np.int64)


def _read_drawn(value: Any) -> Counts:
    rows = [
        [[read_count(count) for count in read_list(pair)] for pair in read_list(labels)] for labels in read_list(value)
    ]
    return np.array(rows, np.int64).reshape(len(rows), -1, 2) if rows else np.zeros((0, 0, 2), np.int64)


def _can_be_drawn(drawn: Counts, true: Counts, texts: int) -> bool:
    """Whether what is predicted and right of each label can be so: both fall as the threshold rises."""
    if drawn.shape[:2] != (len(DRAWN), len(true)):
        return False
    wrong, right = drawn[..., 0] - drawn[..., 1], drawn[..., 1]
    fall = (np.diff(wrong, axis=0) <= 0).all() and (np.diff(right, axis=0) <= 0).all()
    return bool(fall and (wrong >= 0).all() and (right <= true).all() and (wrong <= texts - true).all())


def _curves(labels: Sequence[str], sums: MultilabelSums) -> dict[str, Any]:
    """F1 by threshold of each label, and F1, precision and recall of all together; a gap where one is not defined."""
    if not sums.drawn.size or not sums.texts:
        return {}
    true = [int(row[0]) for row in sums.counts]
    by_label = [[_known(_f1(count, *pair)) for pair in sums.drawn[:, at].tolist()] for at, count in enumerate(true)]
    everything = [(sum(true), *pair) for pair in sums.drawn.sum(1).tolist()]
    together = {
        "f1": [_known(_f1(*counts)) for counts in everything],
        "precision": [right / predicted if predicted else None for _, predicted, right in everything],
        "recall": [right / count if count else None for count, _, right in everything],
    }
    lines = {"thresholds": DRAWN.tolist(), "together": together}
    return {"curves": {**lines, "labels": dict(zip(labels, by_label, strict=True))}}


def _known(value: Value) -> float | None:
    return None if isinstance(value, str) else value


def _best_thresholds(true: Counts, predicted: Counts, right: Counts) -> npt.NDArray[np.float64]:
    """For each label the threshold with the highest F1, the one nearest to THRESHOLD of several."""
    f1 = 2 * right / np.maximum(true + predicted, 1)
    far = np.abs(FITTED - THRESHOLD)
    return np.array([FITTED[np.lexsort((far, -column))[0]] for column in f1.T])


def _written(labels: Sequence[str]) -> str:
    return json.dumps(list(labels), ensure_ascii=False)


def _shown(labels: Sequence[str]) -> str:
    return ", ".join(labels[:MOST_LABELS_SHOWN]) + (", ..." if len(labels) > MOST_LABELS_SHOWN else "")


def _advice(label: str, known: Mapping[str, int]) -> str | None:
    """What to do with several labels in one, or with one that is written otherwise; None where neither is so."""
    parts = [part.strip(" \"'[]") for part in re.split(r"[/+&:,;|]|\s+", label)]
    if len(parts) > 1 and all(part in known for part in parts):
        return f"write one of {' '.join(SEPARATORS)} between labels, the same in the whole file"
    alike = next((name for name in known if name.casefold() == label.casefold()), None)
    return f"write {excerpt(alike)!r}" if alike is not None else None


def _indices(task: Task) -> dict[str, int]:
    """What a built-in task's labels may be written as beside their names, where no name is a number itself."""
    by_index = task.name in BUILTIN and not any(label.isdigit() for label in task.labels)
    return {str(index): index for index in range(len(task.labels))} if by_index else {}


# -- labels in files: every form of them becomes a column of JSON lists ------------------------------------------------


def _read_lines(task: Task, path: Path, table: Table) -> LabelTable:
    """The table of a file of JSON lines, whose lists a table of strings does not have as they are."""
    if task.label in table.columns:
        lines, cells = file_text(path).split("\n"), []
        for row in range(len(table)):
            where = table.location(row)
            record = parse_json(lines[table.number(row) - 1], where, "write one object per line", DataError)
            if task.label not in record:
                raise DataError(f"{where}: has no {task.label!r}; write [] for a text without labels")
            cells.append(_cell(record[task.label], where, None))
        table = replace(table, columns={**table.columns, task.label: cells})
    return _with_lists(task, table)


def _cell(value: Any, where: str, names: Sequence[str] | None) -> str:
    """A value of a label column: a list as JSON, a string as it is; numbers are called by their class labels."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        if not isinstance(value, int) or isinstance(value, bool):
            found = excerpt(repr(value)[:MOST_SHOWN])
            raise DataError(f"{where}: {found} is no list of labels; write a list, such as [] for none")
        value = [value]
    return json.dumps([_label(label, where, names) for label in value], ensure_ascii=False)


def _label(label: Any, where: str, names: Sequence[str] | None) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        if names is not None and not 0 <= label < len(names):
            raise DataError(f"{where}: has the label {label}, and {len(names)} have names; mend the list")
        return str(label) if names is None else names[label]
    if not isinstance(label, str) or not label.strip():
        found = excerpt(repr(label)[:MOST_SHOWN])
        raise DataError(f"{where}: its list has {found}, which is no label; write names in quotes")
    return label.strip()


def _with_lists(task: Task, table: Table) -> LabelTable:
    """The table with a label column of JSON lists, from lists, from labels with a separator, or from flags."""
    if isinstance(table, LabelTable):
        return table
    flags: tuple[str, ...] = ()
    if task.label in table.columns:
        cells = _lists(task, table, table.columns[task.label])
    else:
        flags = _flag_columns(task, table)
        cells = _flagged(table, flags)
    note = f"the labels of {task.name} are {len(flags)} columns of 0 and 1" if flags else ""
    return LabelTable(
        {**table.columns, task.label: cells},
        table.origin,
        table.numbers,
        table.unit,
        "; ".join(filter(None, (table.note, note))),
        flags,
    )


def _lists(task: Task, table: Table, cells: Sequence[str]) -> list[str]:
    plain = [row for row, cell in enumerate(cells) if not cell.startswith("[")]
    separator = _separator(task, table, [cells[row] for row in plain], plain) if plain else None
    found = []
    for row, cell in enumerate(cells):
        where = table.location(row)
        if cell.startswith("["):
            labels = parse_json(cell, where, 'write a list such as ["a", "b"]', DataError)
            assert isinstance(labels, list), "it begins with a bracket"
        else:
            labels = _split(cell, separator)
            if "" in labels:
                raise DataError(
                    f"{where}: column {task.label} has nothing on one side of a `{separator}`; remove it, and leave the"
                    " column empty for a text without labels"
                )
        names = [_label(label, where, None) for label in labels]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise DataError(f"{where}: label {excerpt(twice)!r} in column {task.label} stands there twice; keep one")
        found.append(json.dumps(names, ensure_ascii=False))
    return found


def _split(cell: str, separator: str | None) -> list[str]:
    if not cell.strip():
        return []
    return [part.strip() for part in cell.split(separator)] if separator else [cell.strip()]


def _separator(task: Task, table: Table, cells: Sequence[str], rows: Sequence[int]) -> str | None:
    """What stands between labels: what makes them those that are known, or else the only one there is."""
    different = set(cells)
    known = {*task.labels, *_indices(task)}
    for separator in (None, *SEPARATORS):
        if known and all(known.issuperset(_split(cell, separator)) for cell in different):
            return separator
    there = [separator for separator in SEPARATORS if any(separator in cell for cell in different)]
    if len(there) > 1 and not known:
        first = next(row for row, cell in zip(rows, cells, strict=True) if there[1] in cell)
        raise DataError(
            f"{table.location(first)}: column {task.label} has `{there[1]}`, and `{there[0]}` in other rows, so that"
            f" labels cannot be told apart; write JSON lists, or list the labels under tasks.{task.name}.labels"
        )
    return there[0] if there else None


def _flag_columns(task: Task, table: Table) -> tuple[str, ...]:
    """The columns that say whether a text has one label: those of the labels, or else all that look like it."""
    others = {name: values for name, values in table.columns.items() if name not in task.text}
    if task.labels:
        found = tuple(label for label in task.labels if label in others)
    else:
        # A label column that was named is not to be replaced by others.
        likely = others.items() if task.label == Multilabel.columns[1] else ()
        found = tuple(name for name, values in likely if _looks_flagged(values))
    if not found:
        raise DataError(
            f"{table.origin}: has no column {task.label!r}; write one of {', '.join(table.columns)} under"
            f" tasks.{task.name}.label, or have a column of 0 and 1 for each label"
        ).coded("column_missing", task.name)
    return found


def _looks_flagged(values: Sequence[str]) -> bool:
    return sum(value.strip().lower() in FLAGS for value in values) >= max(1.0, FLAGGED * len(values))


def _flagged(table: Table, flags: Sequence[str]) -> list[str]:
    found: list[list[str]] = [[] for _ in range(len(table))]
    for name in flags:
        for row, value in enumerate(table.columns[name]):
            flag = FLAGS.get(value.strip().lower())
            if flag is None:
                shown = excerpt(repr(value[:MOST_SHOWN])) if value.strip() else "nothing"
                raise DataError(
                    f"{table.location(row)}: column {excerpt(name)} has {shown}, and says 0 or 1 in other rows; write 1"
                    " where the text has the label and 0 where not"
                )
            if flag:
                found[row].append(name)
    return [json.dumps(labels, ensure_ascii=False) for labels in found]


def _check_flags(task: Task, table: LabelTable) -> None:
    missing = [label for label in task.labels if label not in table.flags]
    if missing:
        raise DataError(
            f"{table.origin}: has no column of 0 and 1 for {excerpt(missing[0])!r}, one of the labels of {task.name};"
            f" add it, or leave the label out of tasks.{task.name}.labels"
        ).coded("column_missing", task.name)
