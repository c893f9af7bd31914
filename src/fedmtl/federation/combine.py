"""Task-aware averaging: each value is the mean over the clients that returned it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from fedmtl.federation.messages import Update
from fedmtl.model.keys import Key, Weights
from fedmtl.model.plan import SharingPlan, scope_tasks


def client_weight(
    update: Update,
    scope: str,
    plan: SharingPlan,
    task_weights: Mapping[str, float],
    average: Literal["weighted", "uniform"],
) -> float:
    """How much a client counts for a value of that scope: its examples of the tasks in it, times their weights."""
    tasks = scope_tasks(plan, scope, update.tasks)
    if average == "uniform":
        return sum(task_weights[task] for task in tasks) / max(1, len(tasks))
    return sum(update.num_examples[task] * task_weights[task] for task in tasks)


def combine(
    updates: Iterable[Update],
    before: Weights,
    plan: SharingPlan,
    task_weights: Mapping[str, float],
    average: Literal["weighted", "uniform"] = "weighted",
) -> Weights:
    """The mean delta of each value that somebody returned.

    Order does not matter: updates are summed by client id, so a rerun gives the same bits. A token row that
    a client did not return is a zero delta at that client's full weight.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    totals: dict[Key, float] = {}
    for update in ordered:
        for key in update.delta:
            totals[key] = totals.get(key, 0.0) + client_weight(update, key.scope, plan, task_weights, average)
    mean: Weights = {}
    for update in ordered:
        for key, delta in update.delta.items():
            share = client_weight(update, key.scope, plan, task_weights, average) / totals[key]
            if key not in mean:
                mean[key] = torch.zeros_like(before[key])
            _add(mean[key], delta, share, update)
    return mean


def _add(total: torch.Tensor, delta: torch.Tensor, share: float, update: Update) -> None:
    if delta.shape == total.shape:
        total.add_(delta, alpha=share)
    else:
        assert update.rows is not None
        total.index_add_(0, torch.from_numpy(update.rows), delta, alpha=share)
