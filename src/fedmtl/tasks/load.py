"""Every task of a config is loaded here with its examples, from files, the package or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, urlopen

import numpy as np
import numpy.typing as npt

from fedmtl.config import Config, SourceConfig
from fedmtl.errors import DataError, HubUnreachable, needs_extra
from fedmtl.seeds import derive_seed
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask, HubTable
from fedmtl.tasks.embedded import embedded_columns
from fedmtl.tasks.examples import Examples, drop_empty_texts, examples_from, join_examples, no_examples
from fedmtl.tasks.resolve import brings_all, builtin_in_use, resolve_task
from fedmtl.tasks.sources import VALIDATION_FILES, Table, as_text, find_table
from fedmtl.tasks.task import SET_MARK, Task, client_sources, task_clients

SECONDS_TO_ANSWER = 5
HUB = "https://huggingface.co"


def hub_name(source: SourceConfig) -> str:
    """The dataset in words: owner/name, with its subset."""
    return f"{source.hub}/{source.subset}" if source.subset else f"{source.hub}"


def read_hub(source: SourceConfig, split: str, *, task: str = "<name>", known: Task | None = None) -> Table:
    """One split of a hub dataset; class labels come as their numbers. A hub out of reach is a DataError.

    What an earlier run has downloaded is read without the hub. The kind of a `known` task reads the rows.
    """
    origin = f"hub {hub_name(source)} {split}"
    instead = f"use files: `data.root=FOLDER` for a built-in task or `tasks.{task}.source.train: FILE`"
    with _hub(origin, instead, task) as datasets:
        loaded = datasets.load_dataset(source.hub, source.subset, split=split)
        values = loaded.to_dict()
    if known is not None:
        return known.kind_of.read_rows(known, values, origin, lambda column: _class_names(loaded.features.get(column)))
    return Table({name: [as_text(value) for value in column] for name, column in values.items()}, origin)


def _class_names(feature: Any) -> list[str] | None:
    """What the numbers in a column of class labels, or of lists of them, stand for."""
    inner = getattr(feature, "feature", feature)
    names = getattr(inner, "names", None)
    return None if names is None else list(map(str, names))


def hub_splits(source: SourceConfig) -> list[str]:
    """The names of a hub dataset's splits."""
    with _hub(f"hub {hub_name(source)}", "try again where the hub can be reached") as datasets:
        return list(map(str, datasets.get_dataset_split_names(source.hub, source.subset)))


@contextmanager
def _hub(origin: str, instead: str, task: str | None = None) -> Iterator[Any]:
    """The datasets package; whatever goes wrong with it inside the block is a DataError that says what else to do."""
    try:
        import datasets
    except ImportError as error:
        missing = needs_extra(origin, "datasets", "hub")
        raise HubUnreachable(missing, f"or {instead}").coded("hub_unreachable", task) from error
    try:
        with _cached_only_when_out_of_reach():
            _refuse_code(datasets)
            yield datasets
    except Exception as error:
        # Dozens of types from four libraries mean "not there"; none of them is a mistake of ours.
        reason = next(iter(str(error).splitlines()), "").strip().rstrip(".") or type(error).__name__
        unreachable = HubUnreachable(f"{origin}: cannot be loaded ({reason})", instead)
        raise unreachable.coded("hub_unreachable", task) from error


def _refuse_code(datasets: Any) -> None:
    """Keep `datasets` from running a dataset's Python code, which it did or offered to do before its version 4."""
    if hasattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE"):
        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False


@contextmanager
def _cached_only_when_out_of_reach() -> Iterator[None]:
    """Spare a machine without a network the half minute of retries that `datasets` makes and prints."""
    import datasets
    from huggingface_hub import constants

    switches: tuple[Any, ...] = (datasets.config, constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    is_offline = any(before) or not hub_answers()
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = is_offline
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached; known after five seconds, and for as long as the process lives."""
    answers: list[bool] = []
    # A thread, since nothing else ends a name server's silence.
    attempt = Thread(target=lambda: answers.append(_connects()), daemon=True)
    attempt.start()
    attempt.join(SECONDS_TO_ANSWER)
    return bool(answers and answers[0])


def _connects() -> bool:
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    try:
        if getproxies():
            # Only the proxy can tell.
            urlopen(Request(endpoint, method="HEAD"), timeout=SECONDS_TO_ANSWER).close()
        else:
            parts = urlsplit(endpoint)
            port = parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection((parts.hostname or "", port), timeout=SECONDS_TO_ANSWER).close()
    except HTTPError as error:
        # A page that the hub refuses is an answer of the hub; what a proxy could not fetch is none.
        return error.code not in (407, 502, 503, 504)
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task and its examples.

    `train` is what is dealt to the clients that bring no files; the others' are in `client_train` and
    `client_validation`, whole: `train_samples` and `val_samples` are drawn from `train` and `validation`. `further` are
    more validation sets by name, of which no score counts. `repeated` counts the examples with the texts of another
    that the cut of validation left on one side, `idle` those that were cut from clients' files and that nobody scores.
    """

    task: Task
    train: Examples
    validation: Examples
    client_train: dict[str, Examples]
    client_validation: dict[str, Examples]
    origin: str
    synthetic: bool
    validation_cut: bool
    further: dict[str, Examples] = field(default_factory=dict)
    repeated: int = 0
    idle: int = 0

    def validation_sets(self) -> dict[str, Examples]:
        """Every set that a server scores: `validation` under the task's name, others as TASK:NAME."""
        more = {f"{self.task.name}{SET_MARK}{name}": examples for name, examples in self.further.items()}
        return {self.task.name: self.validation, **more}


@dataclass(frozen=True)
class Tables:
    """A source as read; without a validation table, validation is to be cut from train."""

    train: Table
    validation: Table | None
    origin: str
    synthetic: bool = False
    further: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Parts:
    """A source as examples; `repeated` counts those with the texts of another where validation was cut."""

    train: Examples
    validation: Examples
    is_cut: bool
    repeated: int = 0


def load_tasks(config: Config, model: Mapping[str, Task] | None = None) -> dict[str, TaskData]:
    """Every task by name, in config order; the same config gives the same examples in the same order.

    Mistakes in the config are reported before the first file is read. A `test` file or split is never read. With the
    tasks of a trained `model`, labels are those of its heads, and a row with another one is a DataError.
    """
    if model is not None:
        config = _with_labels(config, model)
    holders = task_clients(config)
    tasks = {name: resolve_task(config, name) for name in config.tasks}
    return {name: _load(config, task, holders[name]) for name, task in tasks.items()}


def count_examples(data: Mapping[str, TaskData]) -> dict[str, int]:
    """The training examples of every task, over all clients."""
    return {name: len(part.train) + sum(map(len, part.client_train.values())) for name, part in data.items()}


def needs_hub(config: Config) -> bool:
    """Whether some examples are on the hub, and not in files or in the package."""
    for name, given in config.tasks.items():
        task, brought = resolve_task(config, name), client_sources(config, name)
        if any(source.hub is not None for source in (given.source, *brought.values()) if source):
            return True
        if given.source or brings_all(config, name) or _folder(config, task) is not None:
            continue
        builtin = builtin_in_use(config, name)
        if builtin is None or not (builtin.embedded and _is_embedded(config, builtin)):
            return True
    return False


def fingerprint(part: TaskData) -> dict[str, str]:
    """SHA-256 of a task's examples as they are loaded and split: one of their `texts`, one of their `labels`.

    It is for the folder of a run alone: whoever guesses the examples can check the guess by it.
    """
    sets = {"train": part.train, "validation": part.validation}
    sets |= {f"train of {client}": examples for client, examples in part.client_train.items()}
    sets |= {f"validation of {client}": examples for client, examples in part.client_validation.items()}
    texts, labels = hashlib.sha256(), hashlib.sha256(json.dumps(part.task.labels).encode())
    for name, examples in sets.items():
        for digest in (texts, labels):
            digest.update(json.dumps([name, len(examples)]).encode())
        for column in (*examples.texts, examples.column or ()):
            for text in column:
                # Its length says where a text ends: no two lists of texts are the same bytes.
                encoded = text.encode("utf-8", "surrogatepass")
                texts.update(len(encoded).to_bytes(8, "little") + encoded)
        labels.update(examples.labels.tobytes())
    return {"texts": texts.hexdigest(), "labels": labels.hexdigest()}


def _with_labels(config: Config, model: Mapping[str, Task]) -> Config:
    """The config with the labels of a model's heads: those in the files may have changed since it was trained."""
    tasks = dict(config.tasks)
    for name, task in model.items():
        if name in tasks and task.kind_of.has_labels:
            tasks[name] = tasks[name].model_copy(update={"labels": list(task.labels)})
    return config.model_copy(update={"tasks": tasks})


def known_tasks(config: Config) -> dict[str, Task]:
    """Every task by name, without its examples; they are read only where a task's labels have to be found in them."""
    tasks = {name: resolve_task(config, name) for name in config.tasks}
    if all(task.labels or not task.kind_of.has_labels for task in tasks.values()):
        return tasks
    return {name: part.task for name, part in load_tasks(config).items()}


def read_sources(config: Config, task: Task, *, hub: bool = True) -> dict[str, Tables]:
    """A task's tables as they are read: "" has what belongs to the task itself, a client's name the files it brings.

    Without `hub`, only what is in files is read.
    """
    brought = client_sources(config, task.name)
    tables = {client: _read(source, task) for client, source in brought.items() if hub or source.hub is None}
    is_in_files = _folder(config, task) is not None or getattr(config.tasks[task.name].source, "train", None)
    if not brings_all(config, task.name) and (hub or is_in_files):
        tables[""] = _read_shared(config, task)
    return tables


def test_table(config: Config, task: Task, client: str) -> Table | None:
    """The test file that a task's source names, or the one under `data.root`, or a client's; no run reads it."""
    source = client_sources(config, task.name).get(client) if client else config.tasks[task.name].source
    if source is not None or client:
        path = None if source is None or source.test is None else Path(source.test)
        return None if source is None or path is None else task.kind_of.read_file(task, path, source.delimiter)
    folder = _folder(config, task)
    path = None if folder is None else find_table(folder, ["test"], task.kind_of.suffixes)
    return None if path is None else task.kind_of.read_file(task, path)


def load_test(config: Config, task: Task) -> Examples | None:
    """The examples of all test files of a task, the clients' too; None where there is no file."""
    tables = [test_table(config, task, client) for client in ("", *client_sources(config, task.name))]
    found = [examples_from(table, task) for table in tables if table is not None]
    return join_examples(task, found) if found else None


def _load(config: Config, task: Task, holders: list[str]) -> TaskData:
    name, given = task.name, config.tasks[task.name]
    brought = read_sources(config, task)
    shared = brought.pop("", None)
    if task.kind_of.has_labels and not task.labels:
        trains = [tables.train for tables in [shared, *brought.values()] if tables]
        task = resolve_task(config, name, task.kind_of.found_labels(task, trains))
    client_parts = {client: _split(config, task, tables, client) for client, tables in brought.items()}
    is_dealt = len(brought) < len(holders)
    if shared:
        by_column = is_dealt and config.partition.kind == "column"
        parts = _split(config, task, shared, column=config.partition.column if by_column else None)
        # Examples that no client gets must not reach a centralized baseline either.
        parts = parts if is_dealt else replace(parts, train=no_examples(task))
    else:
        validation = join_examples(task, (part.validation for part in client_parts.values()))
        parts = Parts(no_examples(task), validation, any(part.is_cut for part in client_parts.values()))
    return TaskData(
        task=task,
        train=_draw(parts.train, given.train_samples, derive_seed(config.seed, "train_samples", name)),
        validation=_draw(parts.validation, given.val_samples, derive_seed(config.seed, "val_samples", name)),
        client_train={client: part.train for client, part in client_parts.items()},
        client_validation={client: part.validation for client, part in client_parts.items()},
        origin=shared.origin if shared else _origin_of_clients(brought),
        synthetic=shared is not None and shared.synthetic,
        validation_cut=parts.is_cut,
        repeated=parts.repeated if shared else sum(part.repeated for part in client_parts.values()),
        idle=_num_idle(config, client_parts) if shared else 0,
        further={
            other: _draw(examples_from(table, task), given.val_samples, derive_seed(config.seed, "val", name, other))
            for other, table in (shared.further if shared else {}).items()
        },
    )


def _num_idle(config: Config, client_parts: Mapping[str, Parts]) -> int:
    """How many examples were cut from clients' files for scores at the clients, where the server alone scores."""
    at_clients = config.evaluation.where == "clients" or any(
        level == "client" for rule in config.sharing.rules for level in rule.values()
    )
    return 0 if at_clients else sum(len(part.validation) for part in client_parts.values() if part.is_cut)


def _origin_of_clients(brought: dict[str, Tables]) -> str:
    notes = [tables.train.note for tables in brought.values() if tables.train.note]
    more = f", so are {len(notes) - 1} more" if len(notes) > 1 else ""
    return f"files of {len(brought)} clients" + (f"; {notes[0]}{more}" if notes else "")


def _read_shared(config: Config, task: Task) -> Tables:
    """What belongs to the task itself: the user's source, else the built-in one `data` points to."""
    source = config.tasks[task.name].source
    if source:
        return _read(source, task)
    folder, builtin = _folder(config, task), builtin_in_use(config, task.name)
    if folder is not None:
        return _read_folder(folder, task, builtin.hub.more_validation if builtin and builtin.hub else ())
    assert builtin is not None, f"{task.name} has neither a source nor a built-in one"
    if builtin.embedded and _is_embedded(config, builtin):
        return _read_embedded(builtin.embedded, builtin, task)
    assert builtin.hub is not None, f"{task.name} is neither embedded nor on the hub"
    return _read_builtin_hub(builtin.hub, builtin.text, builtin.label, task)


def _folder(config: Config, task: Task) -> Path | None:
    """The folder of a built-in task under `data.root`; None where its examples are elsewhere."""
    data, builtin = config.data, builtin_in_use(config, task.name)
    if config.tasks[task.name].source or builtin is None or _is_embedded(config, builtin):
        return None
    return Path(data.root) / task.name if data.root is not None and data.source != "hub" else None


def _is_embedded(config: Config, builtin: BuiltinTask) -> bool:
    return builtin.embedded is not None and (builtin.hub is None or config.data.source == "embedded")


def _read(source: SourceConfig, task: Task) -> Tables:
    if source.hub is not None:
        return _read_hub(source, task)
    assert source.train is not None, "SourceConfig has a file or a hub dataset"
    paths = (source.train, source.validation)

    def read(path: str) -> Table:
        return task.kind_of.read_file(task, Path(path), source.delimiter)

    train, validation = (None if path is None else read(path) for path in paths)
    assert train is not None
    further = {name: read(path) for name, path in source.more_validation.items()}
    origin = _origin(Path(source.train).parent, train, validation, *further.values())
    return Tables(train, validation, origin, further=further)


def _read_folder(folder: Path, task: Task, further: Iterable[str]) -> Tables:
    """Read a built-in task's files; those of `further` validation sets are `dev_NAME`, and may be missing."""
    find = partial(find_table, folder, suffixes=task.kind_of.suffixes)
    train = find(["train"])
    if train is None:
        raise DataError(
            f"{folder}: has no train file; put train.tsv.gz there (or another of {', '.join(task.kind_of.suffixes)}), "
            f"or write tasks.{task.name}.source"
        )
    validation = find(VALIDATION_FILES)
    read = partial(task.kind_of.read_file, task)
    tables = read(train), None if validation is None else read(validation)
    files = {name: find([f"dev_{name}", f"validation_{name}"]) for name in further}
    more = {name: read(file) for name, file in files.items() if file is not None}
    return Tables(*tables, _origin(folder, *tables, *more.values()), further=more)


def _origin(folder: Path, *tables: Table | None) -> str:
    """Where files are, and what is unexpected in one of them."""
    notes = [table.note for table in tables if table is not None and table.note]
    return "; ".join([f"files in {folder}", *notes])


def _read_embedded(name: str, builtin: BuiltinTask, task: Task) -> Tables:
    """Read what is in the package, with the labels of the task that it stands for; a config may name its words."""
    theirs = BUILTIN[name].labels
    words = {} if set(task.labels) == set(theirs) else dict(zip(theirs, builtin.labels, strict=True))
    if words and task.kind_of.by_word:
        raise DataError(f"tasks.{name}.labels: the spans of {name} are of {', '.join(theirs)}; remove it")

    def table(split: str) -> Table:
        columns = embedded_columns(name, split)
        if words:
            columns[builtin.label] = [words.get(label, label) for label in columns[builtin.label]]
        return Table(columns, f"embedded {name} {split}")

    return Tables(table("train"), table("validation"), "embedded (synthetic)", synthetic=True)


def _read_builtin_hub(hub: HubTable, text: tuple[str, ...], label: str, task: Task) -> Tables:
    """Read a built-in dataset, whose columns appear under our names and under the dataset's."""
    keys = {"hub": hub.dataset, "subset": hub.subset, "train_split": hub.train_split}
    splits = {"validation_split": hub.validation_split, "more_validation_splits": dict(hub.more_validation)}
    source = SourceConfig.model_validate(keys | splits)
    ours = dict(zip([*text, label], [*hub.text, hub.label], strict=True))
    return _read_hub(source, task, ours)


def _read_hub(source: SourceConfig, task: Task, ours: dict[str, str] | None = None) -> Tables:
    """Rows without a text are left out: some public datasets have a few, and no user can mend them."""

    def read(split: str) -> tuple[Table, int]:
        table = read_hub(source, split, task=task.name, known=task)
        named = {name: table.columns[theirs] for name, theirs in (ours or {}).items() if theirs in table.columns}
        return drop_empty_texts(replace(table, columns=table.columns | named), task.text)

    train, num_empty = read(source.train_split)
    origin = f"hub {hub_name(source)}"
    validation = None
    if source.validation_split is not None:
        validation, more_empty = read(source.validation_split)
        num_empty += more_empty
    further = {}
    for name, split in source.more_validation_splits.items():
        further[name], more_empty = read(split)
        num_empty += more_empty
    origin = f"{origin}, {num_empty} rows without text left out" if num_empty else origin
    return Tables(train, validation, origin, further=further)


def _split(config: Config, task: Task, tables: Tables, client: str = "", column: str | None = None) -> Parts:
    examples = examples_from(tables.train, task, column)
    if tables.validation is not None:
        return Parts(examples, examples_from(tables.validation, task), is_cut=False)
    if len(examples) < 2:
        raise DataError(f"{tables.train.origin}: has one example, and validation has to be cut from it; add more")
    num_validation = min(max(1, round(len(examples) * config.data.validation_fraction)), len(examples) - 1)
    order = _shuffled(len(examples), derive_seed(config.seed, "validation_cut", task.name, client))
    chosen, num_repeated = _cut(examples, order, num_validation)
    validation = replace(examples.take(np.flatnonzero(chosen)), column=None)
    return Parts(examples.take(np.flatnonzero(~chosen)), validation, is_cut=True, repeated=num_repeated)


def _cut(examples: Examples, order: npt.NDArray[np.int64], most: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Mark the examples of validation, at most that many, and count those with the texts of an earlier one.

    Examples whose texts are equal but for case and spaces are all marked or none: they come in the shuffled order, and
    those that are too many for what is left of validation go to train. Without such examples it is the first `most`.
    """
    alike: dict[bytes, list[int]] = {}
    for row in order.tolist():
        texts = "\0".join(" ".join(column[row].lower().split()) for column in examples.texts)
        key = hashlib.blake2b(texts.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        alike.setdefault(key, []).append(row)
    chosen = np.zeros(len(order), dtype=np.bool_)
    left = most
    for rows in alike.values():
        if len(rows) <= left:
            chosen[rows] = True
            left -= len(rows)
    if not chosen.any():
        # Everything is repeated more often than validation is long: the rarest text, unless it is the only one.
        rarest = min(alike.values(), key=len)
        chosen[rarest if len(alike) > 1 else order[:most]] = True
    return chosen, len(order) - len(alike)


def _draw(examples: Examples, count: int | None, seed: int) -> Examples:
    """That many of the examples in their order, or all when there are no more."""
    if count is None or count >= len(examples):
        return examples
    return examples.take(np.sort(_shuffled(len(examples), seed)[:count]))


def _shuffled(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)
