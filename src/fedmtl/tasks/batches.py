"""From a client's shard to batches: examples of similar length together, padded only as far as the longest of them.

Shards are made on access, so that a client costs memory only while it is used. A teacher's outputs, where there is one,
lie in a file beside the tokens: one float32 row for every example, or for every word of every example.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt
from fedmtl.tasks.sequences import OFFSETS, Rows, Sequences, save_rows
from fedmtl.tasks.tokens import TokenPart, Tokens, map_array, open_tokens
from fedmtl.tasks.windows import count_windows, rows_of_texts
from fedmtl.timing import timed

WINDOW = 8


def save_outputs(path: Path, outputs: Rows) -> None:
    """Write a teacher's outputs to a file, all or nothing; those for words end to end."""
    values = outputs.values if isinstance(outputs, Sequences) else outputs
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".outputs-", dir=path.parent, delete=False) as file:
            np.save(file, values.astype(np.float32))
        Path(file.name).replace(path)
    except OSError as error:
        raise FedmtlError(
            f"data.cache: cannot write a teacher's outputs to {path.parent} ({error.strerror or error});"
            " free space there, or name another folder"
        ) from error


@lru_cache(maxsize=64)
def open_outputs(path: Path) -> np.ndarray:
    """As a memory map, so that a worker holds only what it reads."""
    remedy = "delete it, and the teacher answers again"
    try:
        outputs = map_array(path)
    except Exception as error:  # numpy's reader of headers raises any kind
        raise FedmtlError(f"{path}: cannot be read ({excerpt(error)}); {remedy}") from error
    if outputs.dtype.kind != "f" or outputs.ndim != 2:
        raise FedmtlError(f"{path}: is not a teacher's outputs; {remedy}")
    return outputs


def join_rows(parts: Sequence[Any]) -> Any:
    """Return the examples of all parts, one after the other; all are arrays or all are `Sequences`."""
    if not isinstance(parts[0], Sequences):
        return np.concatenate(parts)
    sizes = np.concatenate([part.lengths() for part in parts])
    return Sequences(
        np.concatenate([part.values for part in parts]), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    )


@dataclass(frozen=True)
class Shard:
    """Some examples of one task: a folder of tokens, the labels of all its examples, and which are meant.

    `teacher` is a file of a teacher's outputs for all examples of the folder.
    """

    tokens: Path
    labels: Rows
    indices: np.ndarray
    teacher: Path | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def num_tokens(self) -> int:
        """The tokens of the shard's examples, all parts together: what a pass over them costs."""
        return int(sum(part.lengths_of(self.indices).sum() for part in open_tokens(self.tokens).parts))

    def num_windows(self) -> tuple[int, int]:
        """How many texts of the shard's examples are read in several windows, and how many windows those have."""
        found = [count_windows(part.cuts, self.indices) for part in open_tokens(self.tokens).parts]
        return sum(texts for texts, _ in found), sum(windows for _, windows in found)

    def teacher_outputs(self, batch: np.ndarray) -> np.ndarray:
        """Return the teacher's outputs for these examples, as many rows as a model has for them."""
        assert self.teacher is not None, "shards of a distilled task come with its teacher's outputs"
        outputs, words = open_outputs(self.teacher), open_tokens(self.tokens).words
        if words is not None:
            of_words: np.ndarray = words.with_values(outputs)[batch].values[words[batch].values >= 0]
            return of_words
        chosen: np.ndarray = outputs[batch]
        return chosen

    def digest(self) -> str:
        """A digest of the shard's examples, in order: their tokens and their labels."""
        digest = hashlib.sha256(self.labels[self.indices].tobytes())
        for part in open_tokens(self.tokens).parts:
            digest.update(part.lengths_of(self.indices).tobytes())
            digest.update(_join(part, self.indices).tobytes())
        return digest.hexdigest()

    def used_ids(self) -> list[np.ndarray]:
        """The token ids of the shard's examples, once each, one array per part."""
        return [np.unique(_join(part, self.indices)) for part in open_tokens(self.tokens).parts]


@dataclass(frozen=True)
class TextShard:
    """The same for texts that were tokenized in memory, to be read once."""

    tokens: Tokens
    labels: Rows
    indices: np.ndarray


@dataclass(frozen=True)
class Arrays:
    """One padded batch; a dual pair has all first texts, then all second ones.

    Of a task on words, `places` has the slots of the first pieces (row * width + column) of the words that have one, in
    order, `labels` is a label for each of them, and `words` says which examples' they are. Where a text of the batch
    has several windows, each is a row, and `windows` has the rows of every text (see `rows_of_texts`).
    """

    ids: np.ndarray
    mask: np.ndarray
    segments: np.ndarray
    labels: np.ndarray
    places: np.ndarray | None = None
    words: Sequences | None = None
    windows: np.ndarray | None = None


@timed("batches")
def training_batches(shard: Shard, batch_size: int, seed: int, round_seed: int = 0) -> list[np.ndarray]:
    """Return one epoch as positions in the token folder: every example once, neighbours in length together.

    `seed` says which examples meet; `round_seed` whether long or short ones come first among those that were sorted
    together. Clients with the same `round_seed` have batches of like length at the same time, however many they have.
    """
    order = shard.indices[np.random.Generator(np.random.PCG64(seed)).permutation(len(shard))]
    lengths = open_tokens(shard.tokens).lengths_of(order)
    generator = np.random.Generator(np.random.PCG64(round_seed))
    span = batch_size * WINDOW
    whole = len(order) // span * span
    within = np.argsort(lengths[:whole].reshape(-1, span), axis=1, kind="stable") + np.arange(0, whole, span)[:, None]
    batches: list[np.ndarray] = []
    for window in order[within].reshape(-1, WINDOW, batch_size):
        batches += [window[rank] for rank in generator.permutation(WINDOW)]
    rest = order[whole:][np.argsort(lengths[whole:], kind="stable")]
    ranks = generator.permutation(WINDOW) * batch_size
    return batches + [rest[rank : rank + batch_size] for rank in ranks if rank < len(rest)]


def sorted_batches(shard: Shard | TextShard, batch_size: int) -> list[np.ndarray]:
    """All examples once, longest first, for scoring."""
    lengths = _tokens_of(shard).lengths_of(shard.indices)
    order = shard.indices[np.argsort(-lengths, kind="stable")]
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


@timed("batches")
def collate(shard: Shard | TextShard, batch: np.ndarray, pad_id: int, index: np.ndarray | None) -> Arrays:
    """Pad a batch; `index` maps token ids into a compacted table."""
    parts = _tokens_of(shard).parts
    width = int(max(part.sequence_lengths(batch).max() for part in parts))
    rows = [_pad(part, batch, width, pad_id) for part in parts]
    ids, mask, segments = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    ids = ids if index is None else index[ids]
    words = _tokens_of(shard).words
    if words is None:
        assert not isinstance(shard.labels, Sequences), "a label for every word is of tokens whose words are marked"
        return Arrays(ids, mask, segments, shard.labels[batch], windows=_windows(parts, batch))
    columns = words[batch]
    is_there = columns.values >= 0
    places = columns.owners() * width + columns.values
    if parts[0].cuts is not None:
        # Words are counted over the tokens of all windows end to end, in the order of the batch's slots.
        lengths = parts[0].lengths_of(batch)
        firsts = (np.cumsum(lengths) - lengths)[columns.owners()]
        places = np.flatnonzero(mask)[(firsts + columns.values) * is_there]
    places = places[is_there]
    labels = shard.labels[batch]
    # Texts that are only to be answered come with nothing in the place of labels.
    is_labelled = isinstance(labels, Sequences) and bool(len(labels.values))
    assert not is_labelled or len(labels.values) == len(is_there), "a label for every word"
    of_words = labels.values[is_there] if is_labelled else np.zeros(len(places), np.int64)
    return Arrays(ids, mask, segments, of_words, places, columns)


def _tokens_of(shard: Shard | TextShard) -> Tokens:
    return shard.tokens if isinstance(shard, TextShard) else open_tokens(shard.tokens)


def _windows(parts: Sequence[TokenPart], batch: np.ndarray) -> np.ndarray | None:
    """The rows of every text's windows, first texts before second ones; None where each text has one."""
    cuts = [part.cuts[batch] for part in parts if part.cuts is not None]
    if all(len(each.values) == len(each) for each in cuts):
        return None
    return rows_of_texts(join_rows(cuts))


def _pad(part: TokenPart, batch: np.ndarray, width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts, columns, lengths = part.offsets[batch], np.arange(width), part.sequence_lengths(batch)
    if part.cuts is not None:
        cuts = part.cuts[batch]
        before = np.cumsum(lengths) - lengths
        starts = (starts - before[cuts.offsets[:-1]])[cuts.owners()] + before
    real = columns < lengths[:, None]
    token_index = (starts[:, None] + columns)[real]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    segments = np.zeros(real.shape, dtype=np.int64)
    ids[real] = part.ids[token_index]
    segments[real] = part.segments[token_index]
    return ids, real.astype(np.int64), segments


def _join(part: TokenPart, indices: np.ndarray) -> np.ndarray:
    pieces = [part.ids[part.offsets[i] : part.offsets[i + 1]] for i in indices]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)


ARRAYS = ("labels", "order", "starts")


@dataclass(frozen=True, eq=False)
class DealtArrays:
    """The labels of all examples, and the examples of client i: `order[starts[i] : starts[i + 1]]`."""

    labels: Rows
    order: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, eq=False)
class Dealt:
    """One task's examples as dealt to its clients; the arrays are here, or in a folder that processes share."""

    tokens: Path
    positions: Mapping[str, int]
    arrays: DealtArrays | Path
    teacher: Path | None = None

    def shard(self, client: str) -> Shard:
        position = self.positions[client]
        opened = _opened(self.arrays)
        indices = opened.order[opened.starts[position] : opened.starts[position + 1]]
        return Shard(self.tokens, opened.labels, indices.astype(np.int64), self.teacher)

    def stored(self, folder: Path) -> Dealt:
        """Return a copy whose arrays are in files, of which a process holds only the pages it reads."""
        folder.mkdir(parents=True, exist_ok=True)
        opened = _opened(self.arrays)
        for name in ARRAYS:
            save_rows(folder, name, getattr(opened, name))
        _open.cache_clear()
        return replace(self, arrays=folder)


class Shards(Mapping[str, Mapping[str, Shard]]):
    """client -> task -> shard; a client has all of the files that it brought, or else what it was dealt."""

    def __init__(
        self,
        tasks: Mapping[str, tuple[str, ...]],
        brought: Mapping[str, Mapping[str, Shard]],
        dealt: Mapping[str, Dealt],
    ) -> None:
        self._tasks, self._brought, self._dealt = tasks, brought, dealt

    def __getitem__(self, client: str) -> Mapping[str, Shard]:
        brought = self._brought.get(client, {})
        return {
            task: brought[task] if task in brought else self._dealt[task].shard(client) for task in self._tasks[client]
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def tasks_of(self, client: str) -> tuple[str, ...]:
        """Return a client's tasks without opening its shards."""
        return self._tasks[client]

    def stored(self, folder: Path) -> Shards:
        """Return a copy for other processes: what was dealt is in files."""
        dealt = {task: part.stored(folder / str(number)) for number, (task, part) in enumerate(self._dealt.items())}
        return Shards(self._tasks, self._brought, dealt)


def deal(tokens: Path, labels: Rows, parts: Mapping[str, np.ndarray], teacher: Path | None = None) -> Dealt:
    """Put every client's examples end to end into one array."""
    sizes = [len(part) for part in parts.values()]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    kind = np.int32 if len(labels) < 2**31 else np.int64
    order = np.concatenate([np.zeros(0, kind), *(part.astype(kind) for part in parts.values())])
    positions = {client: position for position, client in enumerate(parts)}
    return Dealt(tokens, positions, DealtArrays(labels, order, starts), teacher)


def tasks_by_client(holders: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return client -> its tasks from task -> its clients; equal tuples are one object."""
    found: dict[str, tuple[str, ...]] = {}
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    for task, clients in holders.items():
        for client in clients:
            tasks = (*found.get(client, ()), task)
            found[client] = same.setdefault(tasks, tasks)
    return found


def _opened(arrays: DealtArrays | Path) -> DealtArrays:
    return arrays if isinstance(arrays, DealtArrays) else _open(arrays)


@lru_cache(maxsize=64)
def _open(folder: Path) -> DealtArrays:
    labels, order, starts = (map_array(folder / f"{name}.npy") for name in ARRAYS)
    offsets = folder / f"{ARRAYS[0]}.{OFFSETS}.npy"
    return DealtArrays(Sequences(labels, map_array(offsets)) if offsets.is_file() else labels, order, starts)
