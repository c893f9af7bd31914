"""Four tasks as a user would have them: csv files and a config that names the tasks, the files and six clients.

`fedmtl data example DIR` writes them for the tutorial (docs/tutorial.md). The texts are those of the package
(`tasks/embedded.py`), which are made up.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from fedmtl.errors import DataError
from fedmtl.runs.folder import write_atomic
from fedmtl.tasks.embedded import embedded_columns

# Rows of a file; a test file has the rows of the package's validation split, so that no text of it is in train.
NUM_ROWS = {"train": 1200, "validation": 200}
CONFIG = "four.yaml"


@dataclass(frozen=True)
class ExampleTask:
    """A task of the example: the embedded task with its texts, the names of its columns, and its kind."""

    embedded: str
    columns: tuple[str, ...]
    kind: str


TASKS = {
    "reviews": ExampleTask("sentiment", ("review", "verdict"), "kind: classification"),
    "duplicates": ExampleTask("paraphrase", ("first", "second", "verdict"), "kind: classification"),
    "closeness": ExampleTask("similarity", ("first", "second", "score"), "kind: regression\n    score_range: [0, 5]"),
    "entailment": ExampleTask("entailment", ("premise", "hypothesis", "verdict"), "kind: classification"),
}
CLIENTS = {
    "newspaper": ("reviews",),
    "library": ("reviews", "duplicates"),
    "helpdesk": ("duplicates",),
    "school": ("closeness",),
    "university": ("closeness", "entailment"),
    "court": ("entailment",),
}


def write_example(folder: Path) -> dict[Path, int]:
    """Write the files of the example into a folder and return them with their rows; one that is there is an error."""
    tables = {
        folder / f"{name}-{split}.csv": (task.columns, rows)
        for name, task in TASKS.items()
        for split, rows in _rows(task).items()
    }
    taken = next((path for path in (*tables, folder / CONFIG) if path.exists() or path.is_symlink()), None)
    if taken is not None:
        raise DataError(f"{taken}: is there already; remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, (columns, rows) in tables.items():
        written = io.StringIO(newline="")
        csv.writer(written, lineterminator="\n").writerows([columns, *rows])
        write_atomic(path, written.getvalue().encode())
    write_atomic(folder / CONFIG, config_of_example().encode())
    return {**{path: len(rows) for path, (_, rows) in tables.items()}, folder / CONFIG: 0}


def config_of_example() -> str:
    """The config of the example: tasks, files and clients, and no setting."""
    lines = [
        "# Tasks, files and who has what; every setting is chosen (`fedmtl config four.yaml` prints them).",
        "tasks:",
    ]
    for name, task in TASKS.items():
        *text, label = task.columns
        lines += [
            f"  {name}:",
            f"    {task.kind}",
            f"    text: [{', '.join(text)}]",
            f"    label: {label}",
            f"    source: {{train: {name}-train.csv, validation: {name}-validation.csv, test: {name}-test.csv}}",
        ]
    lines += ["clients:", *(f"  {name}: {{tasks: [{', '.join(tasks)}]}}" for name, tasks in CLIENTS.items())]
    return "\n".join(lines) + "\n"


def _rows(task: ExampleTask) -> dict[str, list[tuple[str, ...]]]:
    train = list(zip(*embedded_columns(task.embedded, "train").values(), strict=True))
    test = list(zip(*embedded_columns(task.embedded, "validation").values(), strict=True))
    first, second = NUM_ROWS["train"], NUM_ROWS["train"] + NUM_ROWS["validation"]
    return {"train": train[:first], "validation": train[first:second], "test": test}
