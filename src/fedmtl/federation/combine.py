"""Task-aware averaging: each value is the mean over the clients that returned it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedmtl.config import Average
from fedmtl.federation.messages import Update
from fedmtl.model.keys import Key, Weights
from fedmtl.model.plan import SharingPlan, scope_tasks
from fedmtl.model.vocabulary import Rows


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
    row that a client did not return is a zero delta at that client's full weight.
    """

    def __init__(
        self,
        before: Weights,
        plan: SharingPlan,
        task_weights: Mapping[str, float],
        average: Average = "weighted",
    ) -> None:
        self._before, self._plan, self._task_weights, self._average = before, plan, task_weights, average
        self._sums: Weights = {}
        self._totals: dict[Key, float] = {}

    def add(self, update: Update) -> None:
        weights: dict[str, float] = {}
        for key, delta in update.delta.items():
            if key.scope not in weights:
                weights[key.scope] = client_weight(update, key.scope, self._plan, self._task_weights, self._average)
            weight = weights[key.scope]
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._before[key])
            add_delta(self._sums[key], delta, weight, update.rows)
            self._totals[key] = self._totals.get(key, 0.0) + weight

    def result(self) -> Weights:
        """To be asked for once, at the end."""
        return {key: total.div_(self._totals[key]) for key, total in self._sums.items()}


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
