"""What an aggregation rule is, and how one reads updates that wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

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


class WaitingUpdates:
    """All updates of a round, for rules that need them at once: their tensors lie in files until they are looked at."""

    def __init__(self, before: Weights) -> None:
        """`before` are the weights that the updates started from."""
        self._before = before
        self._updates: list[tuple[Update, Mapping[str, float]]] = []

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """Hold an update, with how much it counts in each of its scopes."""
        self._updates.append((update, weights))

    def keys(self) -> Iterator[Key]:
        """Every value that somebody returned, in the order of the weights before."""
        returned = {key for update, _ in self._updates for key in update.delta}
        return (key for key in self._before if key in returned)

    def clients(self, key: Key) -> Sequence[ClientId]:
        """Who returned a value."""
        return [update.client for update, _ in self._updates if key in update.delta]

    def deltas(self, key: Key) -> tuple[Tensor, Tensor]:
        """A value's deltas as (clients, ...) and the clients' weights; a token row that a client lacks is zero."""
        found, weights = [], []
        for update, by_scope in self._updates:
            if key in update.delta:
                delta = update.delta[key]
                if delta.shape != self._before[key].shape:
                    assert update.rows is not None
                    whole = torch.zeros_like(self._before[key])
                    delta = whole.index_copy_(0, torch.from_numpy(update.rows), delta)
                found.append(delta)
                weights.append(by_scope[key.scope])
        return torch.stack(found), torch.tensor(weights, dtype=torch.float64)
