"""What `fedmtl check` looks over: the rows of a file, or those that a config names, with their columns and their owner.

A message of this file names a column only where its name can be no text of an example.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedmtl.capabilities import task_kind
from fedmtl.errors import DataError
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.sources import COMMON_NAMES, LABEL_NAMES, SUFFIXES, TEXT_NAMES, Table, looks_like_names, read_table
from fedmtl.tasks.tag_files import CONLL_ALONE, TAG_NAMES, WORD_NAMES, looks_tagged, read_tags
from fedmtl.tasks.words import plain_text

if TYPE_CHECKING:
    from fedmtl.config import Config
    from fedmtl.tasks.kinds.protocol import TaskKind

Split = Literal["train", "validation", "test"]

SPLIT_WORDS: dict[str, Split] = {"train": "train", "dev": "validation", "valid": "validation", "val": "validation",
                                 "validation": "validation", "test": "test"}  # fmt: skip
# A label with more words may be a text in a wrong column.
MOST_WORDS = 4


@dataclass(frozen=True)
class Part:
    """Rows to look over: whose they are, what they are for, and which columns are texts and label.

    `is_named` says that a config, a policy or the user named the text columns, `is_label_named` that the label column
    has not been guessed from its values. `is_scored` says that labels are numbers on a
    scale; None leaves it to how they look. `score_range` and `known` are the scores and the labels that a run takes.
    Of a `kind` whose examples may have several labels, `found` has all of them.
    """

    table: Table
    text: tuple[str, ...]
    label: str | None
    split: Split = "train"
    task: str = ""
    client: str = ""
    is_named: bool = True
    is_label_named: bool = True
    is_scored: bool | None = None
    score_range: tuple[float, float] | None = None
    known: tuple[str, ...] = ()
    kind: TaskKind | None = None

    @property
    def labels(self) -> list[str]:
        return [] if self.label is None else self.table.columns[self.label]

    @property
    def has_several(self) -> bool:
        """Whether an example may have several labels, or none."""
        return self.kind is not None and self.kind.several_labels

    def labels_of(self, row: int) -> list[str]:
        return [self.labels[row]] if self.kind is None else self.kind.labels_of_cell(self.labels[row])

    @property
    def found(self) -> list[str]:
        """The labels of all examples, one after the other."""
        return [label for row in range(len(self.labels)) for label in self.labels_of(row)]


def file_parts(
    paths: Sequence[Path], text: Sequence[str] = (), label: str | None = None, delimiter: str | None = None
) -> list[Part]:
    """The parts of files and folders; `delimiter` is that of their csv and tsv files.

    A file's name says whether it is train, dev (or validation) or test; a name that says nothing is train. Files of one
    folder belong together, unless their names say nothing: then each is a client's. A folder named as a built-in task
    is that task, every other one a client.
    """
    files = [file for path in paths for file in (_tables_in(path) if path.is_dir() else [path])]
    named = [(file, _split_of(file)) for file in files]
    folders = {file.parent for file in files}
    parts = []
    for file, split in named:
        _refuse_run(file.parent)
        is_separated = ".csv" in file.name.lower() or ".tsv" in file.name.lower()
        tagging = task_kind("tagging") if looks_tagged(file) else None
        table = (
            read_tags(file, text[0] if text else WORD_NAMES[0], label or TAG_NAMES[0])
            if tagging is not None
            else read_table(file, delimiter if is_separated else None)
        )
        folder = file.absolute().parent.name
        task = folder if folder in BUILTIN else ""
        client = _stem(file) if split is None else folder if len(folders) > 1 and not task else ""
        client = client if len(files) > 1 else ""
        if tagging is not None:
            parts.append(_tagged(Part(table, (), None, split or "train", task, client), tagging))
        else:
            parts.append(make_part(table, text, label, split=split or "train", task=task, client=client))
    return parts


def make_part(
    table: Table, text: Sequence[str], label: str | None, *, split: Split, task: str, client: str = ""
) -> Part:
    """A part of a table whose columns are named, or else guessed: from a built-in task, common names, or values."""
    found = _columns(table, text, label, task)
    is_label_named = label is not None or (found[1] or "").lower() in LABEL_NAMES
    return Part(table, *found, split, task, client, is_named=bool(text), is_label_named=is_label_named)


def _tagged(part: Part, kind: TaskKind) -> Part:
    """A part with tagged texts, whose first two columns are the texts and their tags."""
    text, label = list(part.table.columns)[:2]
    columns = {**part.table.columns, text: list(map(plain_text, part.table.columns[text]))}
    table = replace(part.table, columns=columns)
    return replace(part, table=table, text=(text,), label=label, is_scored=False, kind=kind)


def _refuse_run(folder: Path) -> None:
    """Raise for the folder of a run, whose events and results are no examples."""
    if (folder / "events.jsonl").is_file() and (folder / "config.yaml").is_file():
        raise DataError(
            f"{folder}: is the folder of a run, and its files are no examples; name files of examples, or check those"
            f" of its config with `fedmtl check {folder / 'config.yaml'}`"
        )


def _tables_in(folder: Path) -> list[Path]:
    found = [path for path in sorted([*folder.glob("*"), *folder.glob("*/*")]) if _is_table(path)]
    if not found:
        raise DataError(f"{folder}: has no file of examples; they end in {', '.join(SUFFIXES)}")
    return found


def _is_table(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith((*SUFFIXES, *CONLL_ALONE))


def _stem(path: Path) -> str:
    endings = (*SUFFIXES, *CONLL_ALONE)
    return path.name[: -len(next((suffix for suffix in endings if path.name.lower().endswith(suffix)), "")) or None]


def _split_of(path: Path) -> Split | None:
    words = re.split("[^a-z]+", _stem(path).lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _columns(table: Table, text: Sequence[str], label: str | None, task: str) -> tuple[tuple[str, ...], str | None]:
    """The text columns and the label column: those that were named, else the task's, else what they look like."""
    for name in (*text, *filter(None, [label])):
        if name not in table.columns:
            raise DataError(f"{table.origin}: has no column {name}; it has {', '.join(shown_columns(table).values())}")
    builtin = BUILTIN.get(task)
    if builtin and not text and set(builtin.text) <= set(table.columns):
        text = builtin.text
    label = label or next((name for name in table.columns if name.lower() in LABEL_NAMES), None)
    label = label or _likely_label(table, text)
    return tuple(text) or _likely_texts(table, label), label


def _likely_label(table: Table, text: Sequence[str]) -> str | None:
    """The last column whose values are few and short."""
    most = max(2, len(table) // 4)
    for name in reversed([name for name in table.columns if name not in text]):
        values = Counter(table.columns[name])
        if 1 < len(values) <= most and all(len(value.split()) <= MOST_WORDS for value in values):
            return name
    return None


def _likely_texts(table: Table, label: str | None) -> tuple[str, ...]:
    names = {name.lower(): name for name in table.columns if name != label}
    for known in TEXT_NAMES:
        if set(known) <= names.keys():
            return tuple(names[name] for name in known)
    if not names:
        return ()
    return (max(names.values(), key=lambda name: sum(map(len, table.columns[name]))),)


def config_parts(config: Config, *, hub: bool = True) -> list[Part]:
    """The parts of every task of a config as a run would read them, and their test files.

    Without `hub`, only files are read.
    """
    from fedmtl.tasks.load import read_sources, test_table
    from fedmtl.tasks.resolve import resolve_task

    parts = []
    for name in config.tasks:
        task = resolve_task(config, name)
        for client, tables in read_sources(config, task, hub=hub).items():
            splits: list[tuple[Split, Table | None]] = [("train", tables.train), ("validation", tables.validation)]
            splits += [("validation", table) for table in tables.further.values()]
            for split, table in [*splits, ("test", test_table(config, task, client))]:
                if table is not None:
                    _check_columns(table, (*task.text, task.label), name)
                    part = Part(table, task.text, task.label, split, name, client)
                    if task.kind_of.by_word:
                        parts.append(replace(_tagged(part, task.kind_of), known=task.labels))
                    elif task.kind_of.has_labels:
                        # A built-in task's label may be an index too.
                        known = () if name in BUILTIN else task.labels
                        parts.append(replace(part, is_scored=False, known=known, kind=task.kind_of))
                    else:
                        parts.append(replace(part, is_scored=True, score_range=task.score_range))
    return parts


def _check_columns(table: Table, columns: Iterable[str], task: str) -> None:
    for name in columns:
        if name not in table.columns:
            raise DataError(
                f"{table.origin}: has no column {name}, which tasks.{task} names; it has"
                f" {', '.join(shown_columns(table).values())}"
            )


def lacks_header(table: Table) -> bool:
    """Whether the names of columns are likely the first example: they are no names, or stand in their columns again."""
    return not looks_like_names(list(table.columns)) or any(name in values for name, values in table.columns.items())


def shown_columns(table: Table, named: Iterable[str | None] = ()) -> dict[str, str]:
    """The name of every column as it may be shown: its number unless the header is sure to be one.

    It is where it has a name that was given by a config or a user, or one that is common.
    """
    is_header = not COMMON_NAMES.isdisjoint(map(str.lower, table.columns)) and not lacks_header(table)
    if is_header or not set(named).isdisjoint(table.columns):
        return {name: name for name in table.columns}
    return {name: f"column {number}" for number, name in enumerate(table.columns, start=1)}
