"""A dataset of the Hugging Face hub as files: every split, and the lines of a config that read them.

Runs then need neither the hub nor the datasets package, and a study that chooses nothing by its scores finds the test
rows (`fedmtl study scaling --data`), which no run reads.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedmtl.config import SourceConfig
from fedmtl.errors import ConfigError, DataError
from fedmtl.foreign import excerpt
from fedmtl.runs.folder import write_atomic
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask, HubTable
from fedmtl.tasks.examples import drop_empty_texts
from fedmtl.tasks.load import hub_name, hub_splits, read_hub
from fedmtl.tasks.sources import Table, is_number

# What a split is called on the hub -> the name of its file, of which the first that is there counts.
SPLITS = {"train": ("train",), "validation": ("validation", "dev", "valid"), "test": ("test",)}
# Where nothing else says which column has the labels.
LABELS = ("label", "labels", "score", "target", "class")
# More values than this are no list of labels.
MOST_LABELS = 50
# What the hub has for a row whose label is not public.
HIDDEN = ("-1", "")


@dataclass(frozen=True)
class Wanted:
    """What to fetch: a built-in task or a dataset of the hub, and which of its columns are the texts and the label."""

    name: str
    subset: str | None = None
    text: tuple[str, ...] = ()
    label: str | None = None
    format: Literal["jsonl", "csv"] = "jsonl"


@dataclass(frozen=True)
class Fetched:
    """The files that were written with their numbers of rows, what a reader should know of them, and the config."""

    files: Mapping[Path, int]
    remarks: Sequence[str]
    snippet: str


def download(wanted: Wanted, out: Path) -> Fetched:
    """Write every split of a dataset into a folder of `out`; a file that is there already is an error."""
    builtin = BUILTIN.get(wanted.name)
    if builtin is not None and builtin.hub is None:
        raise ConfigError(f"data get: {wanted.name} is in the package, not on the hub; write `data.source: embedded`")
    task = wanted.name if builtin else wanted.name.rpartition("/")[2]
    folder = out / task
    source = _source(wanted, builtin.hub if builtin else None)
    found = _find_splits(source)
    paths = {name: folder / f"{name}.{wanted.format}" for name in found}
    taken = next((path for path in paths.values() if path.exists()), None)
    if taken is not None:
        raise DataError(f"{taken}: is there already; remove it, or name another folder with --out")
    tables = {name: read_hub(source, split, task=task) for name, split in found.items()}
    if builtin and builtin.hub:
        tables = {name: _renamed(table, builtin, builtin.hub) for name, table in tables.items()}
        text, label = builtin.text, builtin.label
    else:
        text, label = _columns(wanted, tables["train"])
    whole, remarks = {}, []
    for name, table in tables.items():
        whole[name], num_empty = drop_empty_texts(table, text)
        if num_empty:
            remarks.append(f"{name}: {num_empty} rows without text are left out")
        if set(whole[name].columns.get(label, ())) <= set(HIDDEN):
            remarks.append(f"{name}: its labels are not public, so that nothing can be scored on it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in whole.items():
        write_atomic(paths[name], _encode(table, wanted.format))
    if "test" in paths:
        remarks.append("test: no run reads it; score it once, with `fedmtl evaluate RUN --task TASK --file FILE`")
    lines = _builtin_lines(task, out) if builtin else _task_lines(task, text, label, whole["train"], paths)
    files = {paths[name]: len(table) for name, table in whole.items()}
    return Fetched(files, remarks, "\n".join(lines))


def _source(wanted: Wanted, hub: HubTable | None) -> SourceConfig:
    if hub is None:
        return SourceConfig.model_validate({"hub": wanted.name, "subset": wanted.subset})
    for option, given in (("--subset", wanted.subset), ("--text", wanted.text), ("--label", wanted.label)):
        if given:
            raise ConfigError(f"{option}: {wanted.name} is a built-in task, whose columns are known; leave it out")
    return SourceConfig.model_validate({"hub": hub.dataset, "subset": hub.subset})


def _find_splits(source: SourceConfig) -> dict[str, str]:
    """The names of our files -> those of the hub's splits."""
    known = hub_splits(source)
    found = {
        name: next(split for split in splits if split in known)
        for name, splits in SPLITS.items()
        if any(split in known for split in splits)
    }
    if "train" not in found:
        raise DataError(f"hub {hub_name(source)}: has no split called train; it has {', '.join(known) or 'none'}")
    return found


def _renamed(table: Table, builtin: BuiltinTask, hub: HubTable) -> Table:
    """The table with the built-in task's names for its columns, which come first."""
    theirs = dict(zip([*builtin.text, builtin.label], [*hub.text, hub.label], strict=True))
    lacking = next((name for name in theirs.values() if name not in table.columns), None)
    if lacking is not None:
        raise DataError(f"{table.origin}: has no column {lacking!r}; it has {', '.join(table.columns)}")
    rest = {name: values for name, values in table.columns.items() if name not in theirs.values()}
    return replace(table, columns={**{name: table.columns[other] for name, other in theirs.items()}, **rest})


def _columns(wanted: Wanted, table: Table) -> tuple[tuple[str, ...], str]:
    """The text columns and the label's: those that were named, or what the table leaves no doubt about."""
    columns = table.columns
    label = wanted.label or next((name for name in LABELS if name in columns), None)
    listed = ", ".join(map(excerpt, columns))
    if label is None or label not in columns:
        raise ConfigError(f"--label: which column of {table.origin} has the labels? Write one of {listed}")
    text = wanted.text or tuple(name for name, values in columns.items() if name != label and _is_text(values))
    unknown = next((name for name in text if name not in columns), None)
    if unknown is not None or len(text) not in (1, 2):
        found = f"found {unknown}" if unknown is not None else f"{len(text)} columns look like texts"
        raise ConfigError(f"--text: {found} in {table.origin}; write one or two of {listed}, with a comma between")
    return text, label


def _is_text(values: Sequence[str]) -> bool:
    """Whether a column has words: an id, a number or a category has no blanks."""
    return sum(" " in value.strip() for value in values[:100]) > min(len(values), 100) / 2


def _encode(table: Table, format: str) -> bytes:
    rows = zip(*table.columns.values(), strict=True)
    if format == "jsonl":
        lines = (json.dumps(dict(zip(table.columns, row, strict=True)), ensure_ascii=False) for row in rows)
        return "".join(f"{line}\n" for line in lines).encode()
    written = io.StringIO(newline="")
    csv.writer(written).writerows([tuple(table.columns), *rows])
    return written.getvalue().encode()


def _builtin_lines(task: str, out: Path) -> list[str]:
    return ["data:", f"  root: {_quoted(out.absolute())}", "  source: files", "tasks:", f"  {task}: {{}}"]


def _task_lines(task: str, text: Sequence[str], label: str, train: Table, paths: Mapping[str, Path]) -> list[str]:
    values = sorted(set(train.columns[label]))
    has_numbers = all(is_number(value) for value in values)
    kind: list[str]
    if len(values) > MOST_LABELS or (has_numbers and any("." in value for value in values)):
        numbers = [float(value) for value in values if is_number(value)]
        scores = f"[{min(numbers, default=0.0):g}, {max(numbers, default=1.0):g}]"
        kind = ["    kind: regression", f"    score_range: {scores}"]
    else:
        listed = ", ".join(_quoted(value) for value in sorted(values, key=float if has_numbers else str))
        kind = ["    kind: classification", f"    labels: [{listed}]"]
    files = [f"      {name}: {_quoted(paths[name].absolute())}" for name in ("train", "validation") if name in paths]
    return [
        "tasks:",
        f"  {_quoted(task)}:",
        *kind,
        f"    text: [{', '.join(map(_quoted, text))}]",
        f"    label: {_quoted(label)}",
        "    source:",
        *files,
    ]


def _quoted(value: object) -> str:
    """A value as YAML takes it for a text, whatever it looks like: JSON is YAML."""
    return json.dumps(str(value), ensure_ascii=False)
