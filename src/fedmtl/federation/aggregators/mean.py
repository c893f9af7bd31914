"""Task-aware averaging: each value is the mean over the clients that returned it (McMahan et al. 2017, by examples).

How much a client counts is decided here for every rule: by its examples, uniformly, or by its share of each task, and
at most by `federation.max_share` of a scope.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from fedmtl.config import Average
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Rows, SharingPlan, Weights, scope_tasks
from fedmtl.timing import timed


def client_weight(
    num_examples: Mapping[str, int],
    scope: str,
    plan: SharingPlan,
    task_weights: Mapping[str, float],
    average: Average,
) -> float:
    """How much a client with these examples counts for a value of that scope: those of its tasks, times their weights.

    With `average: tasks`, pass task weights that are divided by the task's number of examples (see `per_example`).
    """
    tasks = scope_tasks(plan, scope, tuple(num_examples))
    if average == "uniform":
        return sum(task_weights[task] for task in tasks) / max(1, len(tasks))
    return sum(num_examples[task] * task_weights[task] for task in tasks)


def per_example(task_weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    """What one example of each task counts, so that a task has its weight however many there are.

    `sizes` are the examples of the sampled clients, together. One that fails takes its part of a task's weight
    away.
    """
    return {task: weight / (sizes.get(task) or 1) for task, weight in task_weights.items()}


@dataclass(frozen=True)
class ClientWeights:
    """How much every client of a round counts, scope by scope; in a scope of `most_weight` none counts for more."""

    plan: SharingPlan
    task_weights: Mapping[str, float]
    average: Average = "weighted"
    most_weight: Mapping[str, float] = field(default_factory=dict)

    def of(self, update: Update) -> dict[str, float]:
        """By scope of the values that the update brings."""
        return {scope: self._weight(update, scope) for scope in dict.fromkeys(key.scope for key in update.delta)}

    def _weight(self, update: Update, scope: str) -> float:
        weight = client_weight(update.num_examples, scope, self.plan, self.task_weights, self.average)
        return min(weight, self.most_weight.get(scope, math.inf))


def shares_of(weights: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each client's share of the sum of weights in every scope that it returned, given all weights by client."""
    totals: dict[str, float] = {}
    for by_scope in weights.values():
        for scope, weight in by_scope.items():
            totals[scope] = totals.get(scope, 0.0) + weight
    return {
        client: {scope: weight / totals[scope] for scope, weight in by_scope.items() if totals[scope] > 0}
        for client, by_scope in weights.items()
    }


class Mean:
    """The mean delta of each value that somebody returned, in the memory of one model.

    The sum is rounded in the order of `add`, so an order that does not depend on arrival gives the same bits. A token
    row that a client did not return is a zero delta at that client's full weight.
    """

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA) -> None:
        self._before = before
        self._sums: Weights = {}
        self._totals: dict[Key, float] = {}

    @timed("averaging")
    def add(self, update: Update, weights: Mapping[str, float], factors: Mapping[str, float] | None = None) -> None:
        """Add an update with its weight in each scope, and where there are factors its delta times the scope's."""
        for key, delta in update.delta.items():
            weight = weights[key.scope]
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._before[key])
            factor = 1.0 if factors is None else factors[key.scope]
            add_delta(self._sums[key], delta, weight * factor, update.rows)
            self._totals[key] = self._totals.get(key, 0.0) + weight

    @timed("averaging")
    def result(self) -> Weights:
        """The mean, which may be called once."""
        return {key: total.div_(self._totals[key]) for key, total in self._sums.items() if self._totals[key] > 0}

    def remember(self) -> Extra:
        """Nothing: every round's mean begins anew."""
        return NO_EXTRA


def most_weights(weights: Mapping[str, Sequence[float]], max_share: float) -> dict[str, float]:
    """By scope, the weight at which a client is cut so that none has more than `max_share` of the sum.

    `weights` are those of all clients of a scope. Where they are too few for that share, all count alike.
    """
    return {scope: _most_weight(sorted(found, reverse=True), max_share) for scope, found in weights.items() if found}


def _most_weight(weights: Sequence[float], max_share: float) -> float:
    """Cut the largest first: with k of them at the cap c, c = share * (k * c + the rest)."""
    # Summed from the smallest: what is left of a difference of large ones is rounding.
    rests = list(accumulate(reversed(weights)))[::-1]
    for num_cut, (weight, rest) in enumerate(zip(weights, rests, strict=True)):
        left = 1.0 - num_cut * max_share
        if left <= 0:
            return weights[-1]
        cap = max_share * rest / left
        if weight <= cap:
            return cap
    return weights[-1]


def combine(
    updates: Iterable[Update],
    before: Weights,
    plan: SharingPlan,
    task_weights: Mapping[str, float],
    average: Average = "weighted",
) -> Weights:
    """The mean of updates that are all there; their order does not matter, as they are summed by client id."""
    mean, weights = Mean(before), ClientWeights(plan, task_weights, average)
    for update in sorted(updates, key=lambda update: update.client):
        mean.add(update, weights.of(update))
    return mean.result()


def add_delta(total: torch.Tensor, delta: torch.Tensor, weight: float, rows: Rows | None) -> None:
    """Add a delta to a sum; a sliced token table has `rows` of it."""
    if delta.shape == total.shape:
        total.add_(delta, alpha=weight)
    else:
        assert rows is not None
        total.index_add_(0, torch.from_numpy(rows), delta, alpha=weight)
