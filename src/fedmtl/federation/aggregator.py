"""The guide's aggregator: the mean of the updates, split into the shared encoder and the tasks' heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedmtl.federation.combine import combine
from fedmtl.federation.messages import Update
from fedmtl.model.keys import Weights, head_task
from fedmtl.model.plan import SharingPlan


def aggregate_mtl_updates(
    client_updates: Iterable[Update],
    before: Weights,
    plan: SharingPlan,
    task_weights: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """`{'shared': {name: value}, 'task_heads': {task: {name: value}}}` of everything that somebody returned."""
    updates = list(client_updates)
    weights = task_weights or {task: 1.0 for update in updates for task in update.tasks}
    result: dict[str, Any] = {"shared": {}, "task_heads": {}}
    for key, delta in combine(updates, before, plan, weights).items():
        task = head_task(key.name)
        place = result["shared"] if task is None else result["task_heads"].setdefault(task, {})
        place[key.name] = before[key] + delta
    return result
