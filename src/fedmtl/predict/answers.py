"""What a model's outputs say in words, and which tasks fit the texts given; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmtl.errors import DataError, FedmtlError
from fedmtl.tasks.examples import Examples, examples_from
from fedmtl.tasks.kinds.protocol import Answer
from fedmtl.tasks.sequences import Rows
from fedmtl.tasks.task import SET_MARK, Task
from fedmtl.tasks.words import plain_text

if TYPE_CHECKING:
    from fedmtl.config import Config
    from fedmtl.runs.folder import RunFolder
    from fedmtl.tasks.load import TaskData

# Groups of examples that are scored apart.
MOST_GROUPS = 100


@dataclass(frozen=True)
class Prediction:
    """One head's answer to one text or pair: a label with its probabilities, or a score on the task's scale.

    `said` is all of it, where the task's kind has answers of its own.
    """

    task: str
    label: str | None
    score: float | None
    probabilities: Mapping[str, float]
    said: Answer | None = None

    @property
    def answer(self) -> Answer:
        return self.said or Answer(self.label, self.score, self.probabilities)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `fedmtl predict --json` prints it."""
        return {"task": self.task, **self.answer.to_json()}


def to_prediction(task: Task, outputs: np.ndarray, texts: Sequence[str] = ()) -> Prediction:
    """One example's outputs in words: a label, a score in the task's range, or what the task's kind makes of them."""
    answer = task.kind_of.answer(task, outputs, texts)
    return Prediction(task.name, answer.label, answer.score, answer.probabilities, answer)


def to_predictions(task: Task, outputs: Rows, rows: Iterable[Sequence[str]]) -> list[Prediction]:
    """Every example's outputs in words; `rows` are their texts."""
    return [to_prediction(task, each, texts) for each, texts in zip(outputs, rows, strict=True)]


def tasks_on(name: str, tasks: Mapping[str, Task], num_texts: int) -> list[str]:
    """Those of a model's tasks that take this many texts; `name` is the model's."""
    fitting = [task for task, known in tasks.items() if len(known.text) == num_texts]
    if not fitting:
        has, lacks = ("two texts", "one") if num_texts == 1 else ("one text", "two")
        raise FedmtlError(f"{name} has no task on {lacks}; those it has ({', '.join(tasks)}) take {has}")
    return fitting


def check_texts(task: Task, num_texts: int) -> None:
    """Raise a FedmtlError where the task takes another number of texts."""
    if len(task.text) != num_texts:
        wanted = "one text" if len(task.text) == 1 else "two texts"
        raise FedmtlError(f"task {task.name} takes {wanted} ({', '.join(task.text)}); {num_texts} given")


def labelled_sets(task: Task, path: Path, by: str | None = None) -> dict[str, Examples]:
    """The examples of a labelled file that has the task's columns; with `by`, also those of each value of that column.

    The whole file stands under the task's name, its parts under such as `sst2:country=DE`.
    """
    whole = _labelled_examples(task, path, by)
    if whole.column is None:
        return {task.name: whole}
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(whole.column):
        rows.setdefault(value, []).append(row)
    if len(rows) > MOST_GROUPS:
        raise DataError(
            f"{path}: the column {by!r} has {len(rows)} values, and groups are at most {MOST_GROUPS}; name a column"
            " that says which group an example is of"
        )
    groups = {f"{task.name}{SET_MARK}{by}={value}": whole.take(rows[value]) for value in sorted(rows)}
    return {task.name: whole, **groups}


# Called with the name of a set, its task, its examples and what the model gave out for them.
Sink = Callable[[str, Task, Examples, Rows], None]


def named_sets(name: str, data: Mapping[str, TaskData], wanted: Sequence[str], task: str | None) -> dict[str, Examples]:
    """The validation sets of the wanted tasks, or the one that `task` names as TASK:NAME; `name` is the model's."""
    sets = {each: examples for owner in wanted for each, examples in data[owner].validation_sets().items()}
    if task is None or SET_MARK not in task:
        return sets
    if task not in sets:
        raise FedmtlError(f"{name} has no validation set {task}; it has {', '.join(sets)}")
    return {task: sets[task]}


def changed_cuts(run: RunFolder, data: Mapping[str, TaskData], wanted: Sequence[str]) -> list[str]:
    """A line for each of these tasks whose validation is cut from files that changed since the run began.

    A run of an earlier version has no fingerprint of them, and only the number of validation examples to compare.
    """
    from fedmtl.runs.event_lines import events_of
    from fedmtl.runs.events import DataEvent
    from fedmtl.runs.log import read_events
    from fedmtl.tasks.load import fingerprint

    lines = []
    for before in events_of(read_events(run), DataEvent):
        part = data.get(before.task) if before.task in wanted else None
        if part is None or not part.validation_cut:
            continue
        is_same = before.fingerprint == fingerprint(part) if before.fingerprint else True
        if not is_same or before.validation != len(part.validation):
            lines.append(
                f"{run.name}: the data of task {before.task} changed since the run began, so its validation part is cut"
                " otherwise and may have examples that the model was trained on; put back the files as they were, or"
                " give --task and --file with examples that it has not seen"
            )
    return lines


def labelled_test_sets(name: str, config: Config, tasks: Mapping[str, Task]) -> dict[str, Examples]:
    """The examples of these tasks' test files; a FedmtlError where there is none; `name` is the model's."""
    from fedmtl.tasks.load import load_test

    found = {task: load_test(config, known) for task, known in tasks.items()}
    sets = {task: examples for task, examples in found.items() if examples is not None}
    if not sets:
        raise FedmtlError(
            f"{name}: its config names no test file of {', '.join(tasks)}; write tasks.TASK.source.test and run it, or"
            " give --task and --file"
        )
    return sets


def scored_records(name: str, task: Task, examples: Examples, outputs: Rows, *, texts: bool) -> list[dict[str, Any]]:
    """One record for each example of a set: where it stands, its label, the answer and every label's probability."""
    records = []
    for row, given in enumerate(to_predictions(task, outputs, zip(*examples.texts, strict=True))):
        record: dict[str, Any] = {"set": name, "row": row + 1}
        if texts:
            record |= {f"text{n}": plain_text(column[row]) for n, column in enumerate(examples.texts, start=1)}
            record.setdefault("text2", None)
        record["label"] = task.kind_of.written_label(task, examples.labels[row])
        records.append(record | given.answer.scored())
    return records


def _labelled_examples(task: Task, path: Path, column: str | None) -> Examples:
    table = task.kind_of.read_file(task, path)
    wanted = (*task.text, task.label, *([] if column is None else [column]))
    absent = [name for name in wanted if name not in table.columns]
    if absent:
        raise DataError(
            f"{path}: has no column {absent[0]!r}; task {task.name} reads {', '.join(task.text)} and {task.label},"
            f" the file has {', '.join(table.columns)}"
        )
    return examples_from(table, task, column)
