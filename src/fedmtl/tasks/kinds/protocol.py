"""What a kind of task says of its tasks; the rest of the package calls these hooks and knows no kind by name.

A kind of another package inherits from `TaskKind`, or from `LabelledKind` where an example has one of a list of
labels, and overrides what differs. `register(Capability(NAME, task_kind=CLASS))` adds it, and `tasks.<task>.kind: NAME`
of a config chooses it. torch is imported inside the hooks that get tensors: tasks can be read without it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedmtl.config import TaskConfig
from fedmtl.errors import ConfigError
from fedmtl.foreign import printable
from fedmtl.tasks.sequences import Rows, Sequences
from fedmtl.tasks.sources import SUFFIXES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedmtl.tasks.builtin import BuiltinTask
    from fedmtl.tasks.metrics import Sums
    from fedmtl.tasks.sources import Table
    from fedmtl.tasks.task import Task

# A label, or a row of labels, for every example, or a list of labels for the words of each.
Labels = Any
# A metric's value, or the reason why it has none.
Value = float | str


@dataclass(frozen=True)
class Answer:
    """What the outputs of one example say: a label with every label's probability, or a score.

    A kind whose answers are neither has a class of its own that says how they are printed and written.
    """

    label: str | None = None
    score: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        if self.label is None:
            return {"score": self.score}
        return {"label": self.label, "probabilities": dict(self.probabilities)}

    def cells(self) -> dict[str, Any]:
        """The answer as columns of a table, of which the one without a name is called as the task.

        A list is one in JSON lines, and JSON in a cell of other files.
        """
        return {"": self.score if self.label is None else self.label, **self.probabilities}

    def lines(self, text: str, *, coloured: bool) -> list[str]:
        """The answer to a text in a terminal."""
        if self.label is None:
            return ["–" if self.score is None else f"{self.score:.3f}"]
        return [f"{printable(self.label)} ({self.probabilities[self.label]:.3f})"]

    def tagged_words(self) -> list[tuple[str, str]] | None:
        """Every word of the text with its tag, where words are tagged."""
        return None

    def scored(self) -> dict[str, Any]:
        """What `fedmtl evaluate --out` says of an example beside its label, in strings and numbers."""
        return {
            "answer": str(self.score) if self.label is None else self.label,
            "probability": None if self.label is None else self.probabilities[self.label],
            "probabilities": json.dumps(self.probabilities) if self.probabilities else "",
        }


@dataclass(frozen=True)
class PlainHead:
    """A head as plain transformers have it, with the `problem_type` and the names of its outputs.

    `architecture` is what the class that has such a head is called, `<Encoder>For<architecture>`.
    """

    weight: Tensor
    bias: Tensor
    problem_type: str | None
    names: tuple[str, ...]
    architecture: str = "SequenceClassification"


class TaskKind(ABC):
    """Everything that depends on what a task predicts. It has no state: one object serves all tasks of the kind.

    An example has one label, a number or a row of numbers, and a model gives a row of `num_outputs` numbers for it. Of
    a kind that is `by_word` it has a label and a row of outputs for every word, and both are `Sequences`: losses get
    the words of a batch end to end, whosever they are, and answers and sums get those of each example.
    """

    name: ClassVar[str]
    # Every metric in the order of results.csv; those that may be a task's main metric, the default first.
    metrics: ClassVar[tuple[str, ...]]
    main_metrics: ClassVar[tuple[str, ...]]
    # Whether a label is the index of one of `Task.labels`; it is an int64 then, and a float32 otherwise.
    has_labels: ClassVar[bool] = False
    # Whether an example may have several labels, or none.
    several_labels: ClassVar[bool] = False
    # Whether clients may train as one computation, which takes a number for a label.
    stacks: ClassVar[bool] = True
    # Whether the head reads the state of every word's first piece; otherwise it reads one vector of the whole text.
    by_word: ClassVar[bool] = False
    # How the names of its files end; the first that is there is read of a built-in task's folder.
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    # The text columns and the label column of a task that names none.
    columns: ClassVar[tuple[tuple[str, ...], str]] = ((), "")
    # Whether the head of a dual pair starts as the cosine of both texts, which has to mean something for the outputs.
    starts_at_cosine: ClassVar[bool] = False
    # What the loss is multiplied by to be a negative log-likelihood, up to its variance (Kendall et al. 2018).
    likelihood_factor: ClassVar[float] = 1.0

    @property
    def words(self) -> str:
        """The kind in a sentence, such as `a classification`."""
        return f"{'an' if self.name[:1] in 'aeiou' else 'a'} {self.name}"

    def blank_labels(self, count: int) -> Labels:
        """Labels of the right type for examples that have none."""
        if self.by_word:
            return Sequences.empty(count, np.zeros(0, np.int64))
        return np.zeros(count, np.int64) if self.has_labels else np.zeros(count, np.float32)

    # -- from a config to a task --------------------------------------------------------------------------------------

    def labels(self, name: str, given: TaskConfig, defaults: BuiltinTask, found: Sequence[str] = ()) -> tuple[str, ...]:
        """`Task.labels`; `found` are those in the training data. Keys that do not fit are a ConfigError."""
        if given.labels:
            raise ConfigError(f"tasks.{name}.labels: found on {self.words}, which has none; remove it")
        return ()

    def score_range(self, name: str, given: TaskConfig, defaults: BuiltinTask) -> tuple[float, float]:
        """`Task.score_range`."""
        if given.score_range:
            raise ConfigError(
                f"tasks.{name}.score_range: found on {self.words}; remove it, or write `kind: regression`"
            )
        return 0.0, 1.0

    def outputs(self, name: str, given: TaskConfig, labels: Sequence[str]) -> int:
        """`Task.outputs`, which a classification of two labels may choose."""
        if given.outputs is not None:
            raise wrong_outputs(name, given, self.words)
        return 2

    def checked_class_weights(
        self, name: str, given: TaskConfig, labels: Sequence[str]
    ) -> Literal["none", "balanced"] | tuple[float, ...]:
        """`Task.class_weights`."""
        if given.class_weights != "none":
            raise ConfigError(
                f"tasks.{name}.class_weights: found on {self.words}, which has no classes; write `none` or remove it"
            )
        return "none"

    def problem(self, task: Task) -> str | None:
        """Why a task that was read from a file cannot be one of this kind."""
        return None

    def scale(self, task: Task) -> tuple[float, float] | None:
        """The lowest and the highest score, where there are scores."""
        return None

    # -- sources ------------------------------------------------------------------------------------------------------

    def read_file(self, task: Task, path: Path, delimiter: str | None = None) -> Table:
        """A file as a table with the task's columns; whatever is wrong with it is a DataError with its line.

        Where no delimiter is given, it is the one that separates the task's columns in the header.
        """
        from fedmtl.tasks.sources import read_table

        return read_table(path, delimiter, (*task.text, task.label))

    def read_rows(self, task: Task, columns: Mapping[str, Sequence[Any]], origin: str, names: Any = None) -> Table:
        """The same for rows of a hub dataset, in the types that it has; `names` says how its class labels are called.

        `names` gives those of a column, or nothing.
        """
        from fedmtl.tasks.sources import Table, as_text

        return Table({name: list(map(as_text, column)) for name, column in columns.items()}, origin)

    def found_labels(self, task: Task, tables: Sequence[Table]) -> list[str]:
        """The labels in these tables, in order; too few are a DataError."""
        from fedmtl.tasks.examples import labels_in

        return labels_in(tables, task)

    def labels_of_cell(self, cell: str) -> list[str]:
        """The labels that stand in one cell of a label column."""
        return [cell]

    # -- labels -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def parse(self, task: Task, table: Table) -> Labels:
        """The labels of a table's label column; the first that does not fit is a DataError with its line.

        Of a kind `by_word` an example has as many as `split_words` finds words in its text.
        """

    @abstractmethod
    def groups(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What `partition.kind: dirichlet` deals unevenly: a number for every example, alike where labels are."""

    @abstractmethod
    def count_names(self, task: Task) -> list[str]:
        """What examples are counted by: each of the labels, or SCORE_RANGES ranges of scores (`tasks/task.py`)."""

    @abstractmethod
    def counts(self, task: Task, labels: npt.NDArray[Any]) -> list[int]:
        """How many examples there are by each of `count_names`, for the census, handshakes and logit adjustment."""

    def written_label(self, task: Task, label: Any) -> str:
        """One label as a file has it."""
        if self.has_labels:
            return task.labels[int(label)]
        low, high = task.score_range
        return str(round(low + (high - low) * float(label), 6))

    def quantiles(self, task: Task, labels: npt.NDArray[Any]) -> list[float]:
        """The minimum, the quartiles and the maximum of all clients' scores, where there is no list of labels."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def num_outputs(self, task: Task) -> int:
        """The width of the head."""

    def no_outputs(self, task: Task) -> Rows:
        """The outputs of no example."""
        none = np.zeros((0, self.num_outputs(task)), dtype=np.float32)
        return Sequences.empty(0, none) if self.by_word else none

    @abstractmethod
    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of every example or word, (n, outputs) and (n,) or (n, labels) to (n,).

        Clients that train as one computation record it once, so it must not look at the numbers.
        """

    def plain_losses(self, task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same for arrays; a kind that does not write it without torch cannot be scored without it."""
        import torch

        found: npt.NDArray[Any] = self.losses(task, torch.from_numpy(outputs), torch.from_numpy(labels)).numpy()
        return found

    def fitted(self, task: Task, outputs: Rows, labels: Labels) -> Task:
        """The task with `Task.fitted` from the finished model's outputs for validation, such as thresholds."""
        return task

    def class_weights(self, task: Task, labels: npt.NDArray[Any]) -> npt.NDArray[np.float32] | None:
        """What the loss of an example is multiplied by, for each label, at a client with these labels."""
        return None

    def label_offsets(
        self, task: Task, labels: npt.NDArray[Any], everybody: Sequence[int], strength: float
    ) -> npt.NDArray[np.float32] | None:
        """What logit adjustment adds to the outputs at a client with these labels; `everybody`'s are counted.

        None where it means nothing. Logit adjustment refuses a kind with labels that does not write it.
        """
        return None

    def divergences(self, task: Task, first: Tensor, second: Tensor) -> Tensor:
        """How far two rows of outputs are apart, for every example; exactly 0 where they are equal (SMART, R-Drop)."""
        return (first - second).square().sum(-1)

    def distillation_loss(self, task: Task, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """How far a student's outputs are from its teacher's, as the mean over a batch."""
        from torch.nn import functional as F

        return F.mse_loss(student, teacher)

    def in_form_of(self, student: Task, teacher: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A teacher's outputs with as many columns as the student's have; both tasks have the same labels."""
        assert self.num_outputs(student) == self.num_outputs(teacher), "tasks with the same labels have one width"
        return outputs

    # -- answers and scores -------------------------------------------------------------------------------------------

    @abstractmethod
    def answer(self, task: Task, outputs: npt.NDArray[Any], texts: Sequence[str] = ()) -> Answer:
        """What the outputs of one example say, whose text or texts are given where they are at hand."""

    def predicted(self, task: Task, outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The label that each row of outputs says, where there are labels."""
        raise NotImplementedError

    @abstractmethod
    def sum_outputs(
        self,
        task: Task,
        outputs: Any,
        labels: Any,
        loss: float,
        *,
        keep_pairs: bool,
        broken: int,
    ) -> Sums:
        """What finite outputs and their labels add up to; `broken` more were not finite. Sums of parts can be added.

        `keep_pairs` allows every prediction to be in the sums beside its label.
        """

    @abstractmethod
    def read_sums(self, task: Task, data: Mapping[str, Any], *, with_pairs: bool) -> Sums:
        """The sums that a client sent, which may be hostile: a WireError where no outputs can have them."""

    def sums_to_numbers(self, task: Task, sums: Any) -> npt.NDArray[np.float64] | None:
        """The sums as numbers, which are those of all clients once they are added up; None where there are no such.

        How many there are follows from the task alone, and none is larger than the examples by far.
        """
        return None

    def sums_from_numbers(self, task: Task, numbers: npt.NDArray[np.float64]) -> Sums:
        """The sums of all clients from the numbers that theirs add up to, which may be off in their last digits."""
        raise NotImplementedError

    @abstractmethod
    def score(self, task: Task, sums: Any) -> tuple[dict[str, Value], str | None]:
        """All `metrics`, and in words whether the model does no better than a constant."""

    def constant_score(self, task: Task, labels: npt.NDArray[Any]) -> float:
        """The main metric of the best answer that is always the same; 0 where it is not defined."""
        return 0.0

    def evaluation_fields(self, task: Task, sums: Any) -> dict[str, Any]:
        """What an `evaluation` event says beside the metrics, which the report draws.

        It draws a `confusion` (counts of true and predicted labels), `residuals` ({edges, counts}), and `by_label`
        (label -> scores and counts by name).
        """
        return {}

    def outputs_for(self, task: Task, labels: npt.NDArray[Any]) -> npt.NDArray[np.float64] | None:
        """Rows of outputs that say these labels, by which another model's answers are scored; None: it cannot be."""
        return None

    # -- export -------------------------------------------------------------------------------------------------------

    def plain_head(self, task: Task, weight: Tensor, bias: Tensor) -> PlainHead | None:
        """The head as plain transformers compute it; None where they have nothing alike."""
        return None


def wrong_outputs(name: str, given: TaskConfig, what: str) -> ConfigError:
    return ConfigError(
        f"tasks.{name}.outputs: found {given.outputs} on {what}, write it for two classes only or remove it"
    )
