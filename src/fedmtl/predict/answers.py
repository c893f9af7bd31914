"""What a model's outputs say in words, and which tasks fit the texts given; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.errors import DataError, FedmtlError
from fedmtl.tasks.examples import Examples, examples_from
from fedmtl.tasks.sources import read_table
from fedmtl.tasks.task import Task


@dataclass(frozen=True)
class Prediction:
    """One head's answer to one text or pair: a label with its probabilities, or a score on the task's scale."""

    task: str
    label: str | None
    score: float | None
    probabilities: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `fedmtl predict --json` prints it."""
        if self.label is None:
            return {"task": self.task, "score": self.score}
        return {"task": self.task, "label": self.label, "probabilities": dict(self.probabilities)}


def to_prediction(task: Task, outputs: np.ndarray) -> Prediction:
    """One example's outputs as a label or a score in the task's range."""
    answer = task.kind_of.answer(task, outputs)
    return Prediction(task.name, answer.label, answer.score, answer.probabilities)


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


def labelled_examples(task: Task, path: Path) -> Examples:
    """The examples of a labelled file that has the task's columns."""
    table = read_table(path)
    absent = [name for name in (*task.text, task.label) if name not in table.columns]
    if absent:
        raise DataError(
            f"{path}: has no column {absent[0]!r}; task {task.name} reads {', '.join(task.text)} and {task.label},"
            f" the file has {', '.join(table.columns)}"
        )
    return examples_from(table, task)
