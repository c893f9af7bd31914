"""What a step minimises."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from fedmtl.tasks.task import Task


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
