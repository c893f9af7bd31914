"""What a step minimises: the task's loss, and what methods replace it by or add to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedmtl.model.binding import BoundModel
from fedmtl.model.multitask import Inputs
from fedmtl.tasks.batches import Arrays, Shard, collate
from fedmtl.tasks.task import Task
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalMethods, LocalStep


class Objective:
    """The loss of a batch, for the tasks of one client in one round; `methods` have been started."""

    def __init__(
        self,
        bound: BoundModel,
        shards: Mapping[str, Shard],
        device: torch.device,
        methods: LocalMethods | None = None,
    ) -> None:
        self._bound, self._shards, self._device = bound, shards, device
        self._methods = methods or LocalMethods()
        tasks = {name: bound.model.tasks[name] for name in shards}
        found = {
            name: task.kind_of.class_weights(task, shards[name].labels[shards[name].indices])
            for name, task in tasks.items()
        }
        self._class_weights = {
            task: None if weights is None else torch.from_numpy(weights).to(device) for task, weights in found.items()
        }

    def loss(self, task: str, batch: np.ndarray) -> Tensor:
        """What a step on these examples of the task's shard minimises; the model has its values afterwards."""
        model = self._bound.use(task)
        arrays = collate(self._shards[task], batch, model.pad_id, self._bound.index)
        inputs, labels = to_tensors(arrays, self._device)
        step = LocalStep(task, batch, inputs, labels, lambda outputs: self._labelled(step, outputs))
        outputs = self._methods.outputs(step)
        if outputs is None:
            outputs = model(task, inputs)
        fit = self._methods.fit(step, outputs)
        return self._methods.loss(step, outputs, step.labelled(outputs) if fit is None else fit)

    def _labelled(self, step: LocalStep, outputs: Tensor) -> Tensor:
        adjusted = self._methods.adjust(step, outputs)
        return task_loss(self._bound.model.tasks[step.task], adjusted, step.labels, self._class_weights[step.task])


@timed("batches")
def to_tensors(arrays: Arrays, device: torch.device) -> tuple[Inputs, Tensor]:
    """A batch on the device, with its labels."""
    inputs = Inputs(*(torch.from_numpy(part) for part in (arrays.ids, arrays.mask, arrays.segments)))
    return inputs.to(device), torch.from_numpy(arrays.labels).to(device)


def task_loss(task: Task, outputs: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """The mean over the batch; with class weights, the weighted mean."""
    losses = task.kind_of.losses(task, outputs, labels)
    if class_weights is None:
        return losses.mean()
    weights = class_weights[labels]
    return (losses * weights).sum() / weights.sum()
