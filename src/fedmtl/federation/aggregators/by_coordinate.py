"""Yin et al. 2018, Byzantine-Robust Distributed Learning: coordinate median and trimmed mean, within each task.

Every entry of a value moves by the median over the clients of a task, or by their mean without the largest and the
smallest; the clients of a task count alike, as in the paper. Few clients use a rare token, and with those who do not
as zeros a median would never move its row. So a row of a token table is combined over those who returned it, and the
others are a zero delta at their weight, as they are in a mean. In a row that fewer than three clients of a task
returned, deltas are clipped to the median norm of the table's rows, since no rule can tell which of two is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedmtl.federation.aggregators.protocol import Returned, WaitingUpdates
from fedmtl.federation.aggregators.within_tasks import FEWEST, TaskClients, clients_by_task, factors_to_median
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Weights
from fedmtl.timing import timed

# Columns that are sorted at once: the copies that sorting makes stay small beside the value itself.
COLUMNS = 1 << 13

# Makes one row of (clients, columns), of which there are three clients at least.
Center = Callable[[Tensor], Tensor]


class CoordinateMedian:
    """The coordinate median of each task's clients; of an even number of clients the mean of the middle two."""

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA) -> None:
        self._waiting = WaitingUpdates(before)

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        self._waiting.add(update, weights)

    @timed("averaging")
    def result(self) -> Weights:
        """The combined delta of every value."""
        return combine_by_coordinate(self._waiting, lambda deltas: trimmed(deltas, (len(deltas) - 1) // 2))

    def remember(self) -> Extra:
        """Nothing: every round begins anew."""
        return NO_EXTRA


class TrimmedMean:
    """The mean of each task's clients without the share `hostile` of them at either end, entry by entry."""

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA, *, hostile: float) -> None:
        self._waiting = WaitingUpdates(before)
        self._hostile = hostile

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        self._waiting.add(update, weights)

    @timed("averaging")
    def result(self) -> Weights:
        """The combined delta of every value."""
        return combine_by_coordinate(
            self._waiting, lambda deltas: trimmed(deltas, num_hostile(len(deltas), self._hostile))
        )

    def remember(self) -> Extra:
        """Nothing: every round begins anew."""
        return NO_EXTRA


def num_hostile(num_clients: int, share: float) -> int:
    """How many of some clients may be hostile: their share, and always fewer than half."""
    # A third of three is one, whatever rounding makes of it.
    return min(math.floor(num_clients * share + 1e-9), (num_clients - 1) // 2)


def trimmed(deltas: Tensor, cut: int) -> Tensor:
    """The mean over the first dimension without the `cut` largest and smallest entries of every column."""
    return deltas.sort(dim=0).values[cut : len(deltas) - cut].mean(dim=0)


def combine_by_coordinate(waiting: WaitingUpdates, center: Center) -> Weights:
    """The delta of every value: `center` of each task's clients, averaged over tasks by what their clients count."""
    updates = waiting.updates
    clipping = dict(zip((update.client for update in updates), factors_to_median(updates), strict=True))
    # Value by value, each in a call: what all clients returned of one is let go before the next is looked at.
    combined = {key: _combine_value(waiting.returned(key), key.scope, clipping, center) for key in waiting.keys()}  # noqa: SIM118
    return {key: value for key, value in combined.items() if value is not None}


def _combine_value(
    found: Returned, scope: str, clipping: Mapping[str, Mapping[str, float]], center: Center
) -> Tensor | None:
    """The delta of one value; None where those who returned it count nothing."""
    tasks = clients_by_task(found.updates, found.weights.tolist(), scope)
    sum_of_weights = sum(clients.weight for clients in tasks)
    if sum_of_weights <= 0:
        return None
    factors = torch.tensor([clipping[update.client][scope] for update in found.updates])
    row_factors = None if found.has_row is None else _row_factors(found)
    total = torch.zeros_like(found.deltas[0])
    for clients in tasks:
        _add_task(total, found, clients, center, factors, row_factors, sum_of_weights)
    return total


def _add_task(
    total: Tensor,
    found: Returned,
    clients: TaskClients,
    center: Center,
    factors: Tensor,
    row_factors: Tensor | None,
    sum_of_weights: float,
) -> None:
    """Add what one task's clients make of a value, times the task's share."""
    members = torch.tensor(clients.members)
    shares = torch.tensor(clients.weights, dtype=total.dtype) / sum_of_weights
    if not clients.is_comparable:
        for member, share in zip(clients.members, shares.tolist(), strict=True):
            total.add_(found.deltas[member], alpha=share * float(factors[member]))
        return
    if found.has_row is None or row_factors is None:
        _add_center(total.view(1, -1), found.deltas.flatten(1), members, None, center, float(shares.sum()))
        return
    has_row = found.has_row[members]
    # Rows are combined together that the same clients returned.
    patterns, numbers = torch.unique(has_row, dim=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        rows = torch.nonzero(numbers == number).squeeze(1)
        share = float(shares[pattern].sum())
        if int(pattern.sum()) >= FEWEST:
            _add_center(total, found.deltas, members[pattern], rows, center, share)
            continue
        for member, part in zip(members[pattern].tolist(), shares[pattern].tolist(), strict=True):
            clipped = found.deltas[member][rows] * row_factors[member][rows].unsqueeze(-1)
            total.index_add_(0, rows, clipped, alpha=part)


def _add_center(
    total: Tensor, deltas: Tensor, members: Tensor, rows: Tensor | None, center: Center, share: float
) -> None:
    """Add the center of some clients' deltas, chunk by chunk; without rows, of all columns of (clients, columns)."""
    if rows is None:
        for first in range(0, deltas.shape[1], COLUMNS):
            span = slice(first, first + COLUMNS)
            total[0, span].add_(center(deltas[members, span]), alpha=share)
        return
    width = max(1, COLUMNS // max(1, deltas[0, 0].numel()))
    for first in range(0, len(rows), width):
        some = rows[first : first + width]
        total.index_add_(0, some, center(deltas[members.unsqueeze(1), some]), alpha=share)


def _row_factors(found: Returned) -> Tensor:
    """By client and row, what clips it to the lower median norm of all rows that moved."""
    norms = torch.stack([torch.linalg.vector_norm(delta, dim=-1) for delta in found.deltas])
    moved = norms[norms > 0]
    bound = moved.median() if len(moved) else torch.tensor(1.0)
    return torch.where(norms > bound, bound / norms, torch.ones_like(norms))
