"""The guide's two classes: the server's model with its five methods, and the aggregator of the clients' updates.

The guide is a description of server-side multi-task learning after MT-DNN (Liu et al. 2019, Multi-Task Deep Neural
Networks for Natural Language Understanding) with FedAvg (McMahan et al. 2017). A run does not need these classes: they
offer its model and its mean, by the guide's names, to code that brings other clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fedmtl.config.errors import did_you_mean, shown
from fedmtl.config.file import ConfigSource, load_config
from fedmtl.errors import ModelError
from fedmtl.federation.aggregators.mean import combine
from fedmtl.federation.messages import Update
from fedmtl.model.lora import extended_plan
from fedmtl.model.multitask import MultiTaskModel, open_model
from fedmtl.model.saved import start_weights
from fedmtl.sharing.plan import Key, SharingPlan, Weights, check_plan, mode_plan, owner_task
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.load import known_tasks

Parameters = dict[str, Tensor]

# `metrics` may be there, as the guide's clients send them; nothing is computed from them.
UPDATE_KEYS = ("task", "parameters", "num_examples", "client_id", "metrics")


class MTLServerModel:
    """The server's model as named parameters: those that all clients share, each task's head, and each task's slice.

    Getters give the values themselves; setters copy what they are given. What the sharing plan leaves at the clients
    is not here.
    """

    def __init__(self, model: MultiTaskModel, plan: SharingPlan, weights: Weights | None = None) -> None:
        """Name the values in `weights`, which are then read and written in place; by default the model's."""
        self.plan = plan
        self.weights = initial_weights(model, plan) if weights is None else weights
        self._views = plan.keys(model.canonical(), list(model.tasks), "")

    @classmethod
    def from_config(cls, config: ConfigSource) -> Self:
        """Build the model that a run of this config starts with; the config may be a path, a mapping or a Config.

        Data is read only where a classification task does not name its labels.
        """
        config = load_config(config)
        weighed = config.training.loss_weighting == "uncertainty"
        plain = config.compute.encoder == "plain"
        _, model = open_model(config.model, known_tasks(config), config.seed, plain=plain, log_variances=weighed)
        names = list(model.canonical())
        plan = extended_plan(mode_plan(config), names, config.model)
        check_plan(plan, names)
        return cls(model, plan, start_weights(config.model, initial_weights(model, plan), plan, model))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks, in the order of the config."""
        return tuple(self._views)

    def get_shared_parameters(self) -> Parameters:
        """Return the values that every client shares, by name."""
        return {key.name: value for key, value in self.weights.items() if key.scope == "all"}

    def get_task_head_parameters(self, task: str) -> Parameters:
        """Return the values of one task alone: its head, and its adapters where it has some."""
        return {name: self.weights[key] for name, key in self._head(task).items()}

    def get_model_slice_for_task(self, task: str) -> Parameters:
        """Return all that a client of the task is sent: what all share, what its group shares, and its head."""
        return {name: self.weights[key] for name, key in self.slice_keys(task).items()}

    def set_shared_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Replace the shared values that are given; names that are left out stay as they are."""
        self._set({key.name: key for key in self.weights if key.scope == "all"}, params, "shared by all")

    def set_task_head_parameters(self, task: str, params: Mapping[str, Tensor]) -> None:
        """Replace the given values of one task's head; names that are left out stay as they are."""
        self._set(self._head(task), params, f"in the head of {task}")

    def slice_keys(self, task: str) -> dict[str, Key]:
        """Return the key of every value in the task's slice, by parameter name."""
        if task not in self._views:
            raise ModelError(f"no task {task}; the model has {', '.join(self._views)}")
        return {name: key for name, key in self._views[task].items() if key in self.weights}

    def _head(self, task: str) -> dict[str, Key]:
        return {name: key for name, key in self.slice_keys(task).items() if owner_task(name) == task}

    def _set(self, keys: Mapping[str, Key], params: Mapping[str, Tensor], where: str) -> None:
        _check_values(self.weights, keys, params, where)
        for name, value in params.items():
            before = self.weights[keys[name]]
            self.weights[keys[name]] = value.detach().to(before.device, before.dtype, copy=True)


class MTLAggregator:
    """Averages clients' updates as the server model's sharing plan says, and leaves the model itself unchanged."""

    def __init__(self, server_model: MTLServerModel, task_weights: Mapping[str, float] | None = None) -> None:
        """Average for this model; `task_weights` says how much a task counts in shared values, 1 where it is silent."""
        self._model = server_model
        self._task_weights = task_weights or {}

    def aggregate_mtl_updates(self, client_updates: Iterable[Update | Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean over the clients, as `{'shared': {name: value}, 'task_heads': {task: {name: value}}}`.

        Shared values are averaged over all clients, each head over the clients of its task; what nobody returned is
        left out. An update is an `Update`, or a mapping with the `task`, the client's `parameters` after training (by
        name, all of its slice or some of it) and, where they are known, `num_examples`, by which it counts, and
        `client_id`. Without `num_examples` all clients count alike.
        """
        updates = self._read(list(client_updates))
        before, plan = self._model.weights, self._model.plan
        task_weights = {task: 1.0 for update in updates for task in update.tasks} | dict(self._task_weights)
        result: dict[str, Any] = {"shared": {}, "task_heads": {}}
        for key, delta in combine(updates, before, plan, task_weights).items():
            task = owner_task(key.name)
            if task is not None:
                result["task_heads"].setdefault(task, {})[key.name] = before[key] + delta
            elif key.scope == "all":
                result["shared"][key.name] = before[key] + delta
        return result

    def _read(self, given: list[Update | Mapping[str, Any]]) -> list[Update]:
        is_counted = [isinstance(update, Update) or "num_examples" in update for update in given]
        if any(is_counted) and not all(is_counted):
            number = is_counted.index(False) + 1
            raise ModelError(f"update {number}: has no `num_examples`, others have; give it for all, or for none")
        return [
            update if isinstance(update, Update) else self._from_mapping(update, number)
            for number, update in enumerate(given, start=1)
        ]

    def _from_mapping(self, update: Mapping[str, Any], number: int) -> Update:
        """A mapping's values after training, as differences to the model's."""
        where = f"update {number}"
        task, parameters, num_examples = _checked(update, where, self._model.tasks)
        weights, keys = self._model.weights, self._model.slice_keys(task)
        values = {name: _tensor(value, name, where) for name, value in parameters.items()}
        _check_values(weights, keys, values, f"of {task}'s slice ({where})")
        delta: Weights = {}
        for name, value in values.items():
            # A client may send back its whole slice, and what is fixed in it never moves.
            if keys[name].scope != "fixed":
                before = weights[keys[name]]
                delta[keys[name]] = value.to(before.device, before.dtype) - before
        # Sums are rounded in the order of the clients' names, so numbers of one width give that of the updates.
        client = str(update.get("client_id", f"{number:09d}"))
        return Update(0, client, (task,), delta, None, {task: num_examples}, {})


def _checked(update: Mapping[str, Any], where: str, tasks: Sequence[str]) -> tuple[str, Mapping[str, Any], int]:
    """The task, the parameters and the number of examples of a mapping, or a ModelError that says what is wrong."""
    for key in update:
        if key not in UPDATE_KEYS:
            raise ModelError(f"{where}: unknown key {shown(key)}; {did_you_mean(key, UPDATE_KEYS)}")
    task, parameters, num_examples = update.get("task"), update.get("parameters"), update.get("num_examples", 1)
    if task not in tasks:
        raise ModelError(f"{where}: `task` is {shown(task)}; the model has {', '.join(tasks)}")
    if not isinstance(parameters, Mapping) or not parameters:
        raise ModelError(f"{where}: `parameters` is {shown(parameters)}; write the client's values by name")
    if isinstance(num_examples, bool) or not isinstance(num_examples, int) or num_examples < 1:
        raise ModelError(f"{where}: `num_examples` is {shown(num_examples)}; write a whole number of 1 or more")
    return str(task), parameters, num_examples


def _tensor(value: Any, name: str, where: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f"{where}: `{name}` is {shown(value)}; write a tensor or an array of numbers") from None
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{where}: `{name}` has values that are not finite; leave that client out")
    return tensor


def _check_values(weights: Weights, keys: Mapping[str, Key], given: Mapping[str, Tensor], where: str) -> None:
    """Raise a ModelError for a name that is not there, or a value of another shape."""
    for name, value in given.items():
        if name not in keys:
            some = ", ".join(list(keys)[:3]) or "none"
            raise ModelError(f"`{name}` is no parameter {where}; names there look like {some}")
        wanted = tuple(weights[keys[name]].shape)
        if tuple(value.shape) != wanted:
            raise ModelError(f"`{name}`: has shape {tuple(value.shape)}, the model's is {wanted}")
