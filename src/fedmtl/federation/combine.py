"""Task-aware averaging: each value is the mean over the clients that returned it.

What one client may do to that mean is bounded in two ways, each an option: its share of a scope
(`federation.max_share`), and the norm of its update (`federation.aggregation: clipped_mean`). Clipping to the median
norm follows the norm bounding of Sun et al. 2019, Can You Really Backdoor Federated Learning?, with a bound that is
measured, per scope, in the round before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch

from fedmtl.config import Average
from fedmtl.federation.messages import Update
from fedmtl.sharing.keys import Key, Weights
from fedmtl.sharing.plan import SharingPlan, scope_tasks
from fedmtl.sharing.vocabulary import Rows

# Updates that wait for a first median of norms; more would cost memory and tell little more.
MOST_WAITING = 64


def client_weight(
    update: Update,
    scope: str,
    plan: SharingPlan,
    task_weights: Mapping[str, float],
    average: Average,
) -> float:
    """How much a client counts for a value of that scope: its examples of the tasks in it, times their weights.

    Of a mean that takes tasks alike, the weights are those of `per_example`.
    """
    tasks = scope_tasks(plan, scope, update.tasks)
    if average == "uniform":
        return sum(task_weights[task] for task in tasks) / max(1, len(tasks))
    return sum(update.num_examples[task] * task_weights[task] for task in tasks)


def per_example(task_weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    """What one example of each task counts, so that a task has its weight however many there are.

    `sizes` are the examples of the clients that are asked, together. One that fails takes its part of a task's weight
    away.
    """
    return {task: weight / (sizes.get(task) or 1) for task, weight in task_weights.items()}


class StreamingMean:
    """The mean delta of each value that somebody returned, in the memory of one model.

    The sum is rounded in the order of `add`, so an order that does not depend on arrival gives the same bits. A token
    row that a client did not return is a zero delta at that client's full weight. In a scope of `most_weight` no client
    counts for more than that.
    """

    def __init__(
        self,
        before: Weights,
        plan: SharingPlan,
        task_weights: Mapping[str, float],
        average: Average = "weighted",
        most_weight: Mapping[str, float] | None = None,
    ) -> None:
        self._before, self._plan, self._task_weights, self._average = before, plan, task_weights, average
        self._most_weight = most_weight or {}
        self._sums: Weights = {}
        self._totals: dict[Key, float] = {}

    def add(self, update: Update, factors: Mapping[str, float] | None = None) -> None:
        """Add an update, its delta of each scope times that scope's factor."""
        weights: dict[str, float] = {}
        for key, delta in update.delta.items():
            if key.scope not in weights:
                weights[key.scope] = self._weight(update, key.scope)
            weight = weights[key.scope]
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._before[key])
            factor = 1.0 if factors is None else factors[key.scope]
            add_delta(self._sums[key], delta, weight * factor, update.rows)
            self._totals[key] = self._totals.get(key, 0.0) + weight

    def result(self) -> Weights:
        """To be asked for once, at the end."""
        return {key: total.div_(self._totals[key]) for key, total in self._sums.items() if self._totals[key] > 0}

    def _weight(self, update: Update, scope: str) -> float:
        weight = client_weight(update, scope, self._plan, self._task_weights, self._average)
        return min(weight, self._most_weight.get(scope, math.inf))


class ClippedMean:
    """A mean of updates whose norm in each scope is clipped to the median norm of that scope in the last round.

    Updates stream by. Where a scope has no norms of a last round, the first updates wait, `MOST_WAITING` of them at
    most, for the median of their own.
    """

    def __init__(self, mean: StreamingMean, bounds: Mapping[str, float]) -> None:
        self._mean, self._bounds = mean, dict(bounds)
        self._norms: dict[str, list[float]] = {}
        self._waiting: list[tuple[Update, dict[str, float]]] = []

    def add(self, update: Update) -> None:
        norms = scope_norms(update.delta)
        for scope, norm in norms.items():
            self._norms.setdefault(scope, []).append(norm)
        self._waiting.append((update, norms))
        # In the order of `add`, so nobody passes one that waits.
        waits = len(self._waiting) > 1 or not norms.keys() <= self._bounds.keys()
        if not waits or len(self._waiting) >= MOST_WAITING:
            self._release()

    def result(self) -> Weights:
        """To be asked for once, at the end."""
        self._release()
        return self._mean.result()

    def medians(self) -> dict[str, float]:
        """The bounds of the next round; a scope that nobody moved keeps the one it had."""
        return {**self._bounds, **_medians(self._norms)}

    def _release(self) -> None:
        self._bounds = {**_medians(self._norms), **self._bounds}
        for update, norms in self._waiting:
            self._mean.add(update, {scope: _factor(norm, self._bounds.get(scope)) for scope, norm in norms.items()})
        self._waiting = []


def scope_norms(delta: Mapping[Key, torch.Tensor]) -> dict[str, float]:
    """The norm of what an update brings of each scope."""
    squares: dict[str, float] = {}
    for key, value in delta.items():
        norm = float(torch.linalg.vector_norm(value))
        squares[key.scope] = squares.get(key.scope, 0.0) + norm * norm
    return {scope: math.sqrt(square) for scope, square in squares.items()}


def _medians(norms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The lower median by scope: of two clients the smaller, so that one of two cannot lift the bound alone."""
    lower = {scope: sorted(own)[(len(own) - 1) // 2] for scope, own in norms.items()}
    # A bound of 0 would hold a value where it is for good.
    return {scope: norm for scope, norm in lower.items() if norm > 0}


def _factor(norm: float, bound: float | None) -> float:
    return 1.0 if bound is None or norm <= bound else bound / norm


def most_weights(weights: Mapping[str, Sequence[float]], max_share: float) -> dict[str, float]:
    """By scope, the weight at which a client is cut so that none has more than `max_share` of the sum.

    `weights` are those of all clients of a scope. Where they are too few for that share, all count alike.
    """
    return {scope: _most_weight(sorted(own, reverse=True), max_share) for scope, own in weights.items() if own}


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
    mean = StreamingMean(before, plan, task_weights, average)
    for update in sorted(updates, key=lambda update: update.client):
        mean.add(update)
    return mean.result()


def add_delta(total: torch.Tensor, delta: torch.Tensor, weight: float, rows: Rows | None) -> None:
    """Add a delta to a sum; a sliced token table has `rows` of it."""
    if delta.shape == total.shape:
        total.add_(delta, alpha=weight)
    else:
        assert rows is not None
        total.index_add_(0, torch.from_numpy(rows), delta, alpha=weight)
