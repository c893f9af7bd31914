"""The shards of all clients, each made on access, so that a client costs memory only while it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedmtl.tasks.batches import Shard

ARRAYS = ("labels", "order", "starts")


@dataclass(frozen=True, eq=False)
class DealtArrays:
    """The labels of all examples, and the examples of client i: `order[starts[i] : starts[i + 1]]`."""

    labels: np.ndarray
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
            np.save(folder / f"{name}.npy", getattr(opened, name))
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


def deal(tokens: Path, labels: np.ndarray, parts: Mapping[str, np.ndarray], teacher: Path | None = None) -> Dealt:
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
    return DealtArrays(*(np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS))
