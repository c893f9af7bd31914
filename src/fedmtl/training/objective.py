"""What a step minimises: the task's loss, what methods add to it, and what it is multiplied by.

Learnt weights are those of Kendall, Gal and Cipolla 2018, Multi-Task Learning Using Uncertainty to Weigh Losses: with s
the log of a task's variance, a classification adds exp(-s) L + s/2 to what is minimised, a regression
exp(-s) L/2 + s/2. At its best exp(s) is 2 L, or L for a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl.config import SmartConfig
from fedmtl.model.binding import BoundModel
from fedmtl.model.multitask import Inputs, MultiTaskModel
from fedmtl.sharing.keys import HEADS, LOG_VARIANCE
from fedmtl.tasks.batches import Arrays, Shard, collate
from fedmtl.tasks.task import Task
from fedmtl.training.distillation import outputs_loss
from fedmtl.training.settings import LocalSettings
from fedmtl.training.smart import Smart


def weigh(model: MultiTaskModel, task: str, loss: Tensor, settings: LocalSettings) -> Tensor:
    """The part of the task in what a step minimises; the model has the task's values."""
    if settings.loss_weighting == "fixed":
        return loss * settings.loss_weights[task]
    module, leaf = model.canonical()[f"{HEADS}{task}{LOG_VARIANCE}"]
    spread: Tensor = getattr(module, leaf)
    fit = loss / 2 if model.tasks[task].is_regression else loss
    return ((-spread).exp() * fit + spread / 2).sum()


class Objective:
    """The loss of a batch, for the tasks of one client in one round."""

    def __init__(
        self,
        bound: BoundModel,
        shards: Mapping[str, Shard],
        device: torch.device,
        settings: LocalSettings | None = None,
        seed: int = 0,
    ) -> None:
        self._bound, self._shards, self._device = bound, shards, device
        self._distillation = settings.distillation if settings else None
        smart = settings.smart if settings else None
        self._smart = None if smart is None else Smart(bound, SmartConfig.model_validate(smart), seed, device)
        self._class_weights = self._by_labels(class_weights)
        self._offsets = self._by_labels(lambda task, labels: label_offsets(task, labels, settings)) if settings else {}

    def loss(self, task: str, batch: np.ndarray) -> Tensor:
        """What a step on these examples of the task's shard minimises; the model has its values afterwards."""
        model = self._bound.use(task)
        arrays = collate(self._shards[task], batch, model.pad_id, self._bound.index)
        inputs, labels = to_tensors(arrays, self._device)
        if self._smart is None:
            return self._fit(task, model(task, inputs), labels, batch)
        outputs, added = self._smart.outputs(task, inputs)
        return self._fit(task, outputs, labels, batch) + added

    def stepped(self) -> None:
        """To be called after every step."""
        if self._smart is not None:
            self._smart.stepped()

    def _fit(self, task: str, outputs: Tensor, labels: Tensor, batch: np.ndarray) -> Tensor:
        """How far the outputs are from the labels, and from the teacher's outputs where there is one."""
        own = self._bound.model.tasks[task]
        told = self._distillation
        if told is None or task not in told["tasks"]:
            return self._labelled(task, outputs, labels)
        answers = torch.from_numpy(self._shards[task].teacher_outputs(batch)).to(self._device)
        taught = outputs_loss(own, answers, outputs, told["temperature"])
        if told["weight"] == 1.0:
            return taught
        labelled = self._labelled(task, outputs, labels)
        share = float(told["weight"])
        return (1.0 - share) * labelled + share * taught

    def _labelled(self, task: str, outputs: Tensor, labels: Tensor) -> Tensor:
        offsets = self._offsets.get(task)
        adjusted = outputs if offsets is None else outputs + offsets.to(outputs.dtype)
        return task_loss(self._bound.model.tasks[task], adjusted, labels, self._class_weights[task])

    def _by_labels(self, make: Callable[[Task, np.ndarray], np.ndarray | None]) -> dict[str, Tensor | None]:
        """What is made of a task and of the labels this client has of it, on the device."""
        found = {
            task: make(self._bound.model.tasks[task], shard.labels[shard.indices])
            for task, shard in self._shards.items()
        }
        return {task: None if own is None else torch.from_numpy(own).to(self._device) for task, own in found.items()}


def to_tensors(arrays: Arrays, device: torch.device) -> tuple[Inputs, Tensor]:
    """A batch on the device, with its labels."""
    inputs = Inputs(*(torch.from_numpy(part) for part in (arrays.ids, arrays.mask, arrays.segments)))
    return inputs.to(device), torch.from_numpy(arrays.labels).to(device)


def example_losses(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """Squared error, binary cross-entropy or cross-entropy of every example."""
    if task.is_regression:
        return F.mse_loss(outputs.squeeze(-1), labels.to(outputs.dtype), reduction="none")
    if task.outputs == 1:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), labels.to(outputs.dtype), reduction="none")
    return F.cross_entropy(outputs, labels, reduction="none")


def task_loss(task: Task, outputs: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """The mean over the batch; with class weights, the weighted mean."""
    losses = example_losses(task, outputs, labels)
    if class_weights is None:
        return losses.mean()
    weights = class_weights[labels]
    return (losses * weights).sum() / weights.sum()


def class_weights(task: Task, labels: np.ndarray) -> np.ndarray | None:
    """Loss weight of each label: given, or n / (classes * count) by these labels' own counts."""
    if task.is_regression or task.class_weights == "none":
        return None
    if task.class_weights != "balanced":
        return np.asarray(task.class_weights, dtype=np.float32)
    counts = np.bincount(labels, minlength=len(task.labels))
    # A label this client does not have is never looked up; 1 keeps the division whole.
    return (len(labels) / (len(task.labels) * np.maximum(counts, 1))).astype(np.float32)


def label_offsets(task: Task, labels: np.ndarray, settings: LocalSettings) -> np.ndarray | None:
    """What training adds to a task's outputs: the log of each label's share here over its share at all clients.

    Logit adjustment of Menon et al. 2021, Long-Tail Learning via Logit Adjustment: what is trained then answers for the
    federation's shares, and a client is not moved by its own being different. A label counts once more than it occurs,
    so that one that is missing is not pushed away without end.
    """
    counted = settings.label_counts.get(task.name)
    if task.is_regression or not settings.logit_adjustment or not counted:
        return None
    here, everywhere = np.ones(len(task.labels)), np.ones(len(task.labels))
    here += np.bincount(labels, minlength=len(here))
    everywhere[: len(counted)] += counted
    offsets = settings.logit_adjustment * (np.log(here / here.sum()) - np.log(everywhere / everywhere.sum()))
    # One output for two labels is how far the second is above the first.
    return np.asarray(offsets[1:] - offsets[:1] if task.outputs == 1 else offsets, np.float32)
