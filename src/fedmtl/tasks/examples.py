"""Texts and labels of a task, checked against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedmtl.errors import DataError
from fedmtl.tasks.batches import join_rows
from fedmtl.tasks.kinds.protocol import Labels
from fedmtl.tasks.sources import Table, as_number, separation_advice
from fedmtl.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Examples:
    """One list of texts per text column; labels are indices, numbers or lists of them, as the kind of task has them.

    `column` holds the values of the partition column where the task is dealt by one.
    """

    texts: tuple[list[str], ...]
    labels: Labels
    column: list[str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64] | Sequence[int]) -> Examples:
        """The examples at these indices, in their order."""
        rows = np.asarray(indices, dtype=np.int64)
        picked = rows.tolist()
        return Examples(
            texts=tuple([texts[row] for row in picked] for texts in self.texts),
            labels=self.labels[rows],
            column=None if self.column is None else [self.column[row] for row in picked],
        )


def no_examples(task: Task) -> Examples:
    """Examples of a task, none of them."""
    return Examples(tuple([] for _ in task.text), task.kind_of.blank_labels(0))


def join_examples(task: Task, parts: Iterable[Examples]) -> Examples:
    """Return all parts, one after the other, without the partition column."""
    every = [no_examples(task), *parts]
    return Examples(
        texts=tuple([text for part in every for text in part.texts[position]] for position in range(len(task.text))),
        labels=join_rows([part.labels for part in every]),
    )


def examples_from(table: Table, task: Task, column: str | None = None) -> Examples:
    """The table's rows as examples of the task; the first row that does not fit is a DataError."""
    for key, name in [*(("text", text) for text in task.text), ("label", task.label)]:
        _check_column(table, name, f"tasks.{task.name}.{key}", task)
    if column is not None:
        _check_column(table, column, "partition.column", task)
    _check_texts(table, task)
    return Examples(
        texts=tuple(table.columns[name] for name in task.text),
        labels=task.kind_of.parse(task, table),
        column=None if column is None else table.columns[column],
    )


def labels_in(tables: Sequence[Table], task: Task) -> list[str]:
    """The labels in these tables, sorted (as numbers when all are); fewer than two is a DataError."""
    values: set[str] = set()
    for table in tables:
        _check_column(table, task.label, f"tasks.{task.name}.label", task)
        values.update(table.columns[task.label])
    values.discard("")
    if len(values) < 2:
        found = f"only the label {min(values)!r}" if values else "no label"
        raise DataError(
            f"{tables[0].origin}: column {task.label} holds {found}, and {task.name} needs two or more; "
            f"add examples of others, or name another column under tasks.{task.name}.label"
        ).coded("data_unusable", task.name)
    numbers = {value: as_number(value) for value in values}
    if any(np.isnan(number) for number in numbers.values()):
        return sorted(values)
    return sorted(values, key=lambda value: (numbers[value], value))


def drop_empty_texts(table: Table, text: Sequence[str]) -> tuple[Table, int]:
    """Return the table without rows that lack a text, and how many those were; for data that users cannot mend."""
    columns = [table.columns[name] for name in text if name in table.columns]
    complete = [row for row, texts in enumerate(zip(*columns, strict=True)) if all(map(str.strip, texts))]
    if not complete or len(complete) == len(table):
        return table, 0
    rows = {name: [values[row] for row in complete] for name, values in table.columns.items()}
    numbers = table.numbers or range(1, len(table) + 1)
    return replace(table, columns=rows, numbers=[numbers[row] for row in complete]), len(table) - len(complete)


def _check_column(table: Table, name: str, key: str, task: Task) -> None:
    if name not in table.columns:
        instead = f"write one of {', '.join(table.columns)} under {key}"
        if len(table.columns) == 1:
            otherwise = "where columns are separated otherwise, write source.delimiter"
            instead = f"the file has one; {separation_advice(list(table.columns)) or otherwise}"
        raise DataError(f"{table.origin}: has no column {name!r}; {instead}").coded("column_missing", task.name)


def _check_texts(table: Table, task: Task) -> None:
    for name in task.text:
        empty = [row for row, text in enumerate(table.columns[name]) if not text or text.isspace()]
        if empty:
            raise DataError(
                f"{table.location(empty[0])}: column {name} is empty, in {len(empty)} of {len(table)} rows; "
                f"fill or remove them, or name another column under tasks.{task.name}.text"
            ).coded("text_empty", task.name, table.number(empty[0]))
