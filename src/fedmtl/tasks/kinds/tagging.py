"""Tagging: spans of words of several types, such as names and diseases, by cross-entropy over each word's IOB2 tag.

The head reads the state of each word's first piece. Spans are counted exactly, as conlleval and seqeval do (Tjong Kim
Sang and De Meulder 2003): a predicted span is right where its first word, its last word and its type are those of a
span of the text. What is counted adds up, so that clients return counts and no prediction.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmtl.config import TaskConfig
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.foreign import printable
from fedmtl.tasks.builtin import BuiltinTask
from fedmtl.tasks.kinds.classification import Classification
from fedmtl.tasks.kinds.protocol import Answer, PlainHead, TaskKind, Value
from fedmtl.tasks.metrics import MOST_EXAMPLES, Counts, not_those_of, read_count, read_list, read_loss
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.sources import Table
from fedmtl.tasks.tag_files import TAG_SUFFIXES, read_tags, tagged_rows
from fedmtl.tasks.tag_schemes import OUTSIDE, Span, lenient_spans, split_tag, strict_spans
from fedmtl.tasks.words import SEPARATOR, plain_text, split_words

if TYPE_CHECKING:
    from torch import Tensor

    from fedmtl.tasks.task import Task

NOTHING_FOUND = "finds nothing"
# A head has two outputs for each.
MOST_TYPES = 10_000
MOST_TYPES_SHOWN = 12
# What is counted of each type: spans of the texts, predicted ones and right ones, the last two strictly by IOB2, and
# spans of the texts that a predicted one of their type shares words with, without being the same.
COUNTED = ("true", "predicted", "right", "strictly_predicted", "strictly_right", "other_words")
# Types are counted by what they are taken for, unless there are more.
MOST_CONFUSED = 60
# The row of predicted spans whose words are no span of the text, and the column of spans that were not found.
NO_SPAN = "no span"
# Longer texts are no texts; a client's counts are compared with it.
MOST_WORDS = 1 << 20
COLOURS = ("\x1b[30;46m", "\x1b[30;43m", "\x1b[30;45m", "\x1b[30;42m", "\x1b[30;44m", "\x1b[30;41m")
PLAIN = "\x1b[0m"
# A word's tag says what every word is; the same as the label of a text.
_WORDS = Classification()


@dataclass(frozen=True)
class Entity:
    """A span that was found: its letters from `start` up to `end`, and the least probability of its words' tags."""

    start: int
    end: int
    label: str
    probability: float


@dataclass(frozen=True)
class Tagged(Answer):
    """The spans in a text, in order."""

    text: str = ""
    entities: tuple[Entity, ...] = ()
    # One for each word of the text, and the letters of each.
    tags: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def tagged_words(self) -> list[tuple[str, str]]:
        return [(self.text[start:end], tag) for (start, end), tag in zip(self.spans, self.tags, strict=True)]

    def to_json(self) -> dict[str, Any]:
        found = [{**vars(each), "text": self.text[each.start : each.end]} for each in self.entities]
        return {"entities": found}

    def cells(self) -> dict[str, Any]:
        return {"": [[each.start, each.end, each.label] for each in self.entities]}

    def scored(self) -> dict[str, Any]:
        """Tags, as the example's label has them, and under `probabilities` the spans with theirs."""
        least = min((each.probability for each in self.entities), default=None)
        spans = [[each.start, each.end, each.label, each.probability] for each in self.entities]
        return {"answer": " ".join(self.tags), "probability": least, "probabilities": json.dumps(spans)}

    def lines(self, text: str, *, coloured: bool) -> list[str]:
        if not self.entities:
            return ["nothing"]
        lines = [
            f"{printable(each.label)} {each.start}-{each.end} ({each.probability:.3f})"
            f" {printable(self.text[each.start : each.end])}"
            for each in self.entities
        ]
        return [self._coloured(), *lines] if coloured else lines

    def _coloured(self) -> str:
        kinds = list(dict.fromkeys(each.label for each in self.entities))
        parts, at = [], 0
        for each in self.entities:
            colour = COLOURS[kinds.index(each.label) % len(COLOURS)]
            parts += [self.text[at : each.start], None, colour, self.text[each.start : each.end], each.label]
            at = each.end
        shown = ""
        for before, _, colour, inside, label in zip(*[iter(parts)] * 5, strict=True):
            shown += f"{printable(before)}{colour}{printable(inside)} {printable(label)}{PLAIN}"
        return shown + printable(self.text[at:])


@dataclass(frozen=True, eq=False)
class TaggingSums:
    """What is COUNTED of each type, a row for each; the loss and the number of texts.

    `confusion` counts true types (rows) by the type that is predicted for exactly their words, with NO_SPAN behind the
    types; it has no rows where there are more than MOST_CONFUSED. `broken` counts texts whose outputs were not finite;
    nothing else of them is counted.
    """

    counts: Counts
    texts: int
    loss: float
    broken: int = 0
    confusion: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    @property
    def examples(self) -> int:
        return self.texts + self.broken

    def __add__(self, other: TaggingSums) -> TaggingSums:
        assert self.counts.shape == other.counts.shape, "sums of one task have one shape"
        loss, broken = self.loss + other.loss, self.broken + other.broken
        confusion = self.confusion + other.confusion
        return TaggingSums(self.counts + other.counts, self.texts + other.texts, loss, broken, confusion)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "counts": self.counts.tolist(), "confusion": self.confusion.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaggingSums:
        """The sums again, bit for bit; a WireError where no predictions can have them."""
        with not_those_of("a tagging"):
            counts, confusion = (_read_counts(data[name]) for name in ("counts", "confusion"))
            texts, broken = read_count(data["texts"]), read_count(data["broken"])
            sums = cls(counts, texts, read_loss(data["loss"]), broken, confusion)
        if counts.shape != (len(counts), len(COUNTED)):
            raise WireError(f"evaluation sums: the counts are not {len(COUNTED)} for each type")
        true, predicted, right, strictly_predicted, strictly_right, other_words = counts.T
        whole = right <= np.minimum(true, predicted)
        # A span that is whole by IOB2 is one by the lenient rule too.
        strict = (strictly_right <= np.minimum(right, strictly_predicted)) & (strictly_predicted <= predicted)
        # A predicted span that is right shares no word with another.
        near = (other_words <= true - right) & ((other_words == 0) | (predicted > right))
        most = texts * MOST_WORDS
        if not (whole & strict & near).all() or int(true.sum()) > most or int(predicted.sum()) > most:
            raise WireError("evaluation sums: no predictions have these counts of spans")
        if confusion.size and not _agrees(confusion, true, predicted, right):
            raise WireError("evaluation sums: what types are taken for does not agree with the counts of spans")
        return sums


class Tagging(TaskKind):
    """A word has one of the tags O, B-type and I-type, in that order; `Task.labels` are the types."""

    name = "tagging"
    metrics = ("f1", "macro_f1", "strict_f1", "precision", "recall")
    main_metrics = ("f1", "macro_f1", "strict_f1")
    has_labels = True
    several_labels = True
    by_word = True
    suffixes = TAG_SUFFIXES
    columns = (("tokens",), "tags")

    def labels(self, name: str, given: TaskConfig, defaults: BuiltinTask, found: Sequence[str] = ()) -> tuple[str, ...]:
        for label in given.labels or ():
            if label == OUTSIDE or (split_tag(label) is not None):
                raise ConfigError(
                    f"tasks.{name}.labels: found {label}, write types alone, such as PER, without B- or O"
                )
        return tuple(given.labels or defaults.labels or found)

    def problem(self, task: Task) -> str | None:
        if len(task.text) != 1 or task.outputs != 2:
            return "a tagging has one text, and a head of its own width"
        fits = 1 <= len(task.labels) <= MOST_TYPES and len(set(task.labels)) == len(task.labels)
        return None if fits else "it has no types"

    # -- sources ------------------------------------------------------------------------------------------------------

    def read_file(self, task: Task, path: Path, delimiter: str | None = None) -> Table:
        if delimiter is not None:
            raise DataError(f"{path}: has no delimiter; remove `source.delimiter`, columns are apart by tabs or spaces")
        return read_tags(path, task.text[0], task.label)

    def read_rows(self, task: Task, columns: Mapping[str, Sequence[Any]], origin: str, names: Any = None) -> Table:
        return tagged_rows(columns, origin, task.text[0], task.label, names or (lambda column: None))

    def found_labels(self, task: Task, tables: Sequence[Table]) -> list[str]:
        types = {kind for table in tables for cell in set(table.columns[task.label]) for kind in _types(cell)}
        if not types:
            raise DataError(
                f"{tables[0].origin}: no word has another tag than O; add texts with spans, or name another column"
                f" under tasks.{task.name}.label"
            ).coded("data_unusable", task.name)
        return sorted(types)

    def labels_of_cell(self, cell: str) -> list[str]:
        return _types(cell)

    def parse(self, task: Task, table: Table) -> Sequences:
        known = {tag: number for number, tag in enumerate(tag_names(task))}
        rows: list[list[int]] = []
        for row, cell in enumerate(table.columns[task.label]):
            tags = cell.split(SEPARATOR)
            numbers = [known.get(tag, -1) for tag in tags]
            if -1 in numbers:
                more = ", ..." if len(task.labels) > MOST_TYPES_SHOWN else ""
                at = numbers.index(-1)
                raise DataError(
                    f"{table.location(row)}: word {at + 1} has the tag {tags[at]!r}, and the types of {task.name} are"
                    f" {', '.join(task.labels[:MOST_TYPES_SHOWN])}{more}; mend it, or list every type under"
                    f" tasks.{task.name}.labels"
                ).coded("label_unknown", task.name, table.number(row))
            rows.append(numbers)
        return Sequences.of(rows, np.int64)

    # -- labels -------------------------------------------------------------------------------------------------------

    def groups(self, labels: Any) -> npt.NDArray[Any]:
        """The commonest type of a text, from 1; 0 where it has none."""
        found = [Counter(((row[row % 2 == 1] + 1) // 2).tolist()).most_common(1) for row in labels]
        return np.array([most[0][0] if most else 0 for most in found], dtype=np.int64)

    def count_names(self, task: Task) -> list[str]:
        return list(task.labels)

    def counts(self, task: Task, labels: Any) -> list[int]:
        """How many spans there are of each type: labels are IOB2, so each has one B-."""
        begins = labels.values[labels.values % 2 == 1] // 2
        return [int(count) for count in np.bincount(begins, minlength=len(task.labels))]

    def written_label(self, task: Task, label: Any) -> str:
        names = tag_names(task)
        return " ".join(names[number] for number in label.tolist())

    # -- training -----------------------------------------------------------------------------------------------------

    def num_outputs(self, task: Task) -> int:
        return 1 + 2 * len(task.labels)

    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(outputs, labels, reduction="none")

    def plain_losses(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return _WORDS.plain_losses(task, outputs, labels)

    def divergences(self, task: Task, first: Tensor, second: Tensor) -> Tensor:
        return _WORDS.divergences(task, first, second)

    def distillation_loss(self, task: Task, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """That of a classification, as the mean over words: soft tags."""
        return _WORDS.distillation_loss(task, teacher, student, temperature)

    # -- answers and scores -------------------------------------------------------------------------------------------

    def answer(self, task: Task, outputs: npt.NDArray[Any], texts: Sequence[str] = ()) -> Tagged:
        assert texts, "spans are those of a text"
        names, words = tag_names(task), split_words(texts[0])
        shares = _WORDS.probabilities(task, outputs) if len(outputs) else np.zeros((0, len(names)))
        numbers = shares.argmax(axis=1)
        least = shares.max(axis=1) if len(outputs) else np.zeros(0)
        tags = tuple(names[number] for number in numbers.tolist())
        found = tuple(
            Entity(words[start][0], words[end - 1][1], kind, float(least[start:end].min()))
            for kind, start, end in lenient_spans([_split(tag) for tag in tags])
        )
        return Tagged(text=plain_text(texts[0]), entities=found, tags=tags, spans=tuple(words))

    def predicted(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        numbers: npt.NDArray[np.int64] = outputs.argmax(axis=1)
        return numbers

    def sum_outputs(
        self, task: Task, outputs: Sequences, labels: Sequences, loss: float, *, keep_pairs: bool, broken: int
    ) -> TaggingSums:
        assert np.array_equal(outputs.offsets, labels.offsets), "an output for every word"
        tags = [_split(tag) for tag in tag_names(task)]
        predicted = outputs.values.argmax(axis=1) if len(outputs.values) else np.zeros(0, np.int64)
        pairs = [
            ([tags[n] for n in true.tolist()], [tags[n] for n in guess.tolist()])
            for true, guess in zip(labels, outputs.with_values(predicted), strict=True)
            # Where all is O, nothing is counted.
            if true.any() or guess.any()
        ]
        strict = count_spans(task.labels, pairs, lambda tags: strict_spans(tags, "IOB2"))
        lenient, other_words, confusion = _compare(task.labels, pairs)
        counts = np.concatenate([lenient, strict[:, 1:], other_words[:, None]], axis=1)
        return TaggingSums(counts, len(labels), float(loss), broken, confusion)

    def read_sums(self, task: Task, data: Mapping[str, Any], *, with_pairs: bool) -> TaggingSums:
        sums = TaggingSums.from_dict(data)
        if len(sums.counts) != len(task.labels):
            raise WireError(
                f"evaluation sums: {len(sums.counts)} types, task {task.name} has {len(task.labels)};"
                " give client and server the same labels"
            )
        if len(sums.confusion) != _confused(task.labels):
            raise WireError("evaluation sums: what types are taken for is not counted for each type")
        return sums

    def score(self, task: Task, sums: TaggingSums) -> tuple[dict[str, Value], str | None]:
        if not sums.texts:
            return dict.fromkeys(self.metrics, "no examples"), None
        true, predicted, right, strictly_predicted, strictly_right, _ = (int(count) for count in sums.counts.sum(0))
        each = [_f1(*row[:3]) for row in sums.counts.tolist() if row[0] + row[1]]
        values: dict[str, Value] = {
            "f1": _f1(true, predicted, right),
            "macro_f1": math.fsum(map(float, each)) / len(each) if each else "there is no span",
            "strict_f1": _f1(true, strictly_predicted, strictly_right),
            "precision": right / predicted if predicted else "no span is predicted",
            "recall": right / true if true else "the texts have no span",
        }
        return values, NOTHING_FOUND if not right else None

    def evaluation_fields(self, task: Task, sums: TaggingSums) -> dict[str, Any]:
        by_label: dict[str, dict[str, float | None]] = {}
        for label, (true, predicted, right, *_, other_words) in zip(task.labels, sums.counts.tolist(), strict=True):
            f1 = _f1(true, predicted, right)
            by_label[label] = {
                "f1": None if isinstance(f1, str) else f1,
                "precision": right / predicted if predicted else None,
                "recall": right / true if true else None,
                "true": true,
                "predicted": predicted,
                "right": right,
                "other_words": other_words,
            }
        if not sums.confusion.size:
            return {"by_label": by_label}
        names = [*task.labels, NO_SPAN]
        return {"by_label": by_label, "confusion": sums.confusion.tolist(), "confusion_names": names}

    # -- export -------------------------------------------------------------------------------------------------------

    def plain_head(self, task: Task, weight: Tensor, bias: Tensor) -> PlainHead:
        return PlainHead(weight, bias, "token_classification", tuple(tag_names(task)), "TokenClassification")


def tag_names(task: Task) -> list[str]:
    """The tags that a head's outputs stand for."""
    return [OUTSIDE, *(f"{prefix}-{label}" for label in task.labels for prefix in "BI")]


Tags = Sequence[tuple[str, str]]


def count_spans(
    labels: Sequence[str], pairs: Sequence[tuple[Tags, Tags]], read: Callable[[Tags], Sequence[Span]]
) -> Counts:
    """How many spans of each type are true, predicted and right in texts with true and predicted tags."""
    rows = {label: [0, 0, 0] for label in labels}
    for true, guess in pairs:
        known = set(read(true))
        for kind, *_ in known:
            rows[kind][0] += 1
        for span in read(guess):
            rows[span[0]][1] += 1
            rows[span[0]][2] += span in known
    return np.array(list(rows.values()), dtype=np.int64).reshape(-1, 3)


def _confused(labels: Sequence[str]) -> int:
    """How many rows the counts of what types are taken for have."""
    return len(labels) + 1 if len(labels) <= MOST_CONFUSED else 0


def _compare(labels: Sequence[str], pairs: Sequence[tuple[Tags, Tags]]) -> tuple[Counts, Counts, Counts]:
    """By the lenient rule: what `count_spans` counts, of each type the spans with other words, and the confusion."""
    index = {label: number for number, label in enumerate(labels)}
    counts = np.zeros((len(labels), 3), np.int64)
    other_words = np.zeros(len(labels), np.int64)
    size, none = _confused(labels), len(labels)
    confusion = np.zeros((size, size), np.int64)
    for true_tags, guess_tags in pairs:
        true = {(start, end): index[kind] for kind, start, end in lenient_spans(true_tags)}
        guess = {(start, end): index[kind] for kind, start, end in lenient_spans(guess_tags)}
        types = {at: kind for (start, end), kind in guess.items() for at in range(start, end)}
        for words, kind in true.items():
            found = guess.get(words, none)
            counts[kind] += (1, 0, found == kind)
            other_words[kind] += found != kind and any(types.get(at) == kind for at in range(*words))
            if size:
                confusion[kind, found] += 1
        for words, kind in guess.items():
            counts[kind, 1] += 1
            if size and words not in true:
                confusion[none, kind] += 1
    return counts, other_words, confusion


def _read_counts(value: Any) -> Counts:
    rows = [[read_count(count) for count in read_list(row)] for row in read_list(value)]
    if sum(map(sum, rows)) >= MOST_EXAMPLES:
        raise ValueError("too many")
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(rows[0]) if rows else 0)


def _agrees(confusion: Counts, true: Counts, predicted: Counts, right: Counts) -> bool:
    """Whether rows add up to the true spans, columns to the predicted ones, and the diagonal has the right ones."""
    if confusion.shape != (len(true) + 1,) * 2 or confusion[-1, -1]:
        return False
    rows, columns = confusion[:-1].sum(1), confusion[:, :-1].sum(0)
    same = (rows == true) & (columns == predicted) & (confusion.diagonal()[:-1] == right)
    return bool(same.all())


def _f1(true: int, predicted: int, right: int) -> Value:
    return 2 * right / (true + predicted) if true + predicted else "there is no span"


def _types(cell: str) -> list[str]:
    """The types of the spans in a cell of tags."""
    return [kind for prefix, kind in map(_split, cell.split(SEPARATOR)) if prefix == "B"]


def _split(tag: str) -> tuple[str, str]:
    return (OUTSIDE, "") if tag == OUTSIDE else (tag[0], tag[2:])
