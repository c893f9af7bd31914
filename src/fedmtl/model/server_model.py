"""The server's model as the guide describes it: the five methods by name, over a plan and its values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmtl.errors import ModelError
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.keys import Key, Weights, owner_task
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights

Parameters = dict[str, Tensor]


class MTLServerModel:
    """Views of the server's values by canonical name; setting copies, so what was given stays the giver's.

    `weights` is read and written in place; without it the values are the model's own. What the plan keeps
    at clients is not here.
    """

    def __init__(self, model: MultiTaskModel, plan: SharingPlan, weights: Weights | None = None) -> None:
        self.plan = plan
        self.weights = initial_weights(model, plan) if weights is None else weights
        self._views = plan.keys(model.canonical(), list(model.tasks), "")

    def get_shared_parameters(self) -> Parameters:
        """The values that every client shares."""
        return {key.name: value for key, value in self.weights.items() if key.scope == "all"}

    def get_task_head_parameters(self, task: str) -> Parameters:
        """A task's own values: its head, and its adapters where it has some."""
        return {name: self.weights[key] for name, key in self._head(task).items()}

    def get_model_slice_for_task(self, task: str) -> Parameters:
        """All values the plan gives that task: shared by all, by its group, and its own."""
        return {name: self.weights[key] for name, key in self._view(task).items() if key in self.weights}

    def set_shared_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Replace the values given; names that are left out keep theirs."""
        self._set({key.name: key for key in self.weights if key.scope == "all"}, params, "shared by all")

    def set_task_head_parameters(self, task: str, params: Mapping[str, Tensor]) -> None:
        """Replace the values given of one task's head; names that are left out keep theirs."""
        self._set(self._head(task), params, f"in the head of {task}")

    def _view(self, task: str) -> dict[str, Key]:
        if task not in self._views:
            raise ModelError(f"no task {task}; the model has {', '.join(self._views)}")
        return self._views[task]

    def _head(self, task: str) -> dict[str, Key]:
        return {name: key for name, key in self._view(task).items() if owner_task(name) == task and key in self.weights}

    def _set(self, keys: Mapping[str, Key], params: Mapping[str, Tensor], where: str) -> None:
        for name, value in params.items():
            if name not in keys:
                some = ", ".join(list(keys)[:3]) or "none"
                raise ModelError(f"`{name}` is no parameter {where}; names there look like {some}")
            wanted = tuple(self.weights[keys[name]].shape)
            if tuple(value.shape) != wanted:
                raise ModelError(f"`{name}`: has shape {tuple(value.shape)}, the model's is {wanted}")
        for name, value in params.items():
            before = self.weights[keys[name]]
            self.weights[keys[name]] = value.detach().to(before.device, before.dtype, copy=True)
