"""Updates of a scope that several tasks share, small enough to work out by hand, and how to count what a rule holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import Key

SHARED = Key("all", "layer")
TABLE = Key("all", "table")


def head(task: str) -> Key:
    return Key(f"task:{task}", f"heads.{task}.w")


def update(
    client: str,
    delta: Mapping[Key, Sequence[float] | torch.Tensor],
    task: str = "sst2",
    rows: Sequence[int] | None = None,
    examples: Mapping[str, int] | None = None,
) -> Update:
    """What a client of a task, or of those that it has examples of, returns."""
    counts = dict(examples or {task: 1})
    tensors = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in delta.items()}
    return Update(1, client, tuple(counts), tensors, None if rows is None else np.array(rows), counts, {})


def combined(rule: Aggregator, updates: Sequence[Update], weight: float | None = None) -> dict[Key, torch.Tensor]:
    """What a rule makes of updates that count by their examples, or all the same."""
    for one in updates:
        counts = sum(one.num_examples.values()) if weight is None else weight
        rule.add(one, dict.fromkeys((key.scope for key in one.delta), float(counts)))
    return rule.result()


class Decoded(Mapping[Key, torch.Tensor]):
    """A delta like one in a file: every look makes a tensor."""

    def __init__(self, keys: Sequence[Key], size: int, value: float) -> None:
        self._keys, self._size, self._value = keys, size, value

    def __getitem__(self, key: Key) -> torch.Tensor:
        return torch.full((self._size,), self._value)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are still there; `most` is the highest count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not any(tensor is one for one in args):
                self._follow(tensor, given)
        return out

    def _follow(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        if where in given and where not in self._users:
            return  # It was made before.
        if where not in self._users:
            self.now += size
            self.most = max(self.most, self.now)
        self._users[where] = self._users.get(where, 0) + 1
        weakref.finalize(tensor, self._let_go, where, size)

    def _let_go(self, where: int, size: int) -> None:
        self._users[where] -= 1
        if not self._users[where]:
            del self._users[where]
            self.now -= size
