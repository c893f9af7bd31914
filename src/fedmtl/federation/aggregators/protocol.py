"""What an aggregation rule is, and how one reads updates that wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedmtl.federation.messages import ClientId, Update
from fedmtl.sharing.plan import Extra, Key, Weights


class Aggregator(Protocol):
    """Makes one delta of a round's updates; it is made of the weights before the round and of what was remembered."""

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """Take in an accepted update, which counts `weights` in each of its scopes."""
        ...

    def result(self) -> Weights:
        """The delta of every value that is to move; called once."""
        ...

    def remember(self) -> Extra:
        """What the rule of the next round starts from; called after `result`."""
        ...


class Returned(NamedTuple):
    """All that came back of one value, client by client in the order of their names.

    `deltas` are (clients, ...), zero in token rows that a client did not return; `has_row` is (clients, rows), and None
    where every client returned the whole value. `weights` say how much each client counts in the value's scope.
    """

    updates: Sequence[Update]
    deltas: Tensor
    weights: Tensor
    has_row: Tensor | None


class WaitingUpdates:
    """All updates of a round, for rules that need them at once: their tensors lie in files until they are looked at.

    What a rule looks at is one value of all clients, so it needs the memory of clients times that value.
    """

    def __init__(self, before: Weights) -> None:
        """`before` are the weights that the updates started from."""
        self._before = before
        self._updates: list[tuple[Update, Mapping[str, float]]] = []

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """Hold an update, with how much it counts in each of its scopes."""
        self._updates.append((update, weights))

    @property
    def updates(self) -> list[Update]:
        """The updates in the order of their clients' names, which no client can choose by answering early or late."""
        return [update for update, _ in self._sorted()]

    def keys(self) -> Iterator[Key]:
        """Every value that somebody returned, in the order of the weights before."""
        returned = {key for update, _ in self._updates for key in update.delta}
        return (key for key in self._before if key in returned)

    def clients(self, key: Key) -> Sequence[ClientId]:
        """Who returned a value, in the order of `deltas`."""
        return [update.client for update, _ in self._sorted() if key in update.delta]

    def deltas(self, key: Key) -> tuple[Tensor, Tensor]:
        """A value's deltas as (clients, ...) and the clients' weights; a token row that a client lacks is zero."""
        found = self.returned(key)
        return found.deltas, found.weights

    def returned(self, key: Key) -> Returned:
        """A value's deltas, with who returned which token rows."""
        found = [(update, by_scope[key.scope]) for update, by_scope in self._sorted() if key in update.delta]
        like = self._before[key]
        # One buffer that is filled: a list of decoded tensors beside it would need the memory twice.
        deltas = torch.zeros((len(found), *like.shape), dtype=like.dtype)
        has_row: Tensor | None = None
        for number, (update, _) in enumerate(found):
            delta = update.delta[key]
            if delta.shape == like.shape:
                deltas[number] = delta
                continue
            assert update.rows is not None
            rows = torch.from_numpy(update.rows)
            deltas[number].index_copy_(0, rows, delta)
            if has_row is None:
                has_row = torch.ones((len(found), len(like)), dtype=torch.bool)
            has_row[number] = False
            has_row[number, rows] = True
        weights = torch.tensor([weight for _, weight in found], dtype=torch.float64)
        return Returned([update for update, _ in found], deltas, weights, has_row)

    def _sorted(self) -> list[tuple[Update, Mapping[str, float]]]:
        return sorted(self._updates, key=lambda item: item[0].client)
