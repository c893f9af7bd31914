"""The guide's aggregator: the mean of the updates, split into the shared encoder and the tasks' heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedmtl.federation.combine import combine
from fedmtl.federation.messages import Update
from fedmtl.model.server_model import MTLServerModel
from fedmtl.sharing.keys import owner_task


class MTLAggregator:
    """Averages updates as the server model's plan says; the model itself is changed by its setters only."""

    def __init__(self, server_model: MTLServerModel, task_weights: Mapping[str, float] | None = None) -> None:
        self._model = server_model
        self._task_weights = task_weights

    def aggregate_mtl_updates(self, client_updates: Iterable[Update]) -> dict[str, Any]:
        """`{'shared': {name: value}, 'task_heads': {task: {name: value}}}` of everything that somebody returned."""
        updates = list(client_updates)
        before, plan = self._model.weights, self._model.plan
        task_weights = self._task_weights or {task: 1.0 for update in updates for task in update.tasks}
        result: dict[str, Any] = {"shared": {}, "task_heads": {}}
        for key, delta in combine(updates, before, plan, task_weights).items():
            task = owner_task(key.name)
            if task is not None:
                result["task_heads"].setdefault(task, {})[key.name] = before[key] + delta
            elif key.scope == "all":
                result["shared"][key.name] = before[key] + delta
        return result
