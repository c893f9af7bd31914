"""What a task's loss is multiplied by: its weight in the config, or one that is learnt.

Kendall, Gal and Cipolla 2018, Multi-Task Learning Using Uncertainty to Weigh Losses: with s the log of a task's
variance, a classification adds exp(-s) L + s/2 to what is minimised, a regression exp(-s) L/2 + s/2. At its best
exp(s) is 2 L, or L for a regression.
"""

from __future__ import annotations

from torch import Tensor

from fedmtl.model.keys import HEADS, LOG_VARIANCE
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.training.settings import LocalSettings


def weigh(model: MultiTaskModel, task: str, loss: Tensor, settings: LocalSettings) -> Tensor:
    """The part of the task in what a step minimises; the model has the task's values."""
    if settings.loss_weighting == "fixed":
        return loss * settings.loss_weights[task]
    module, leaf = model.canonical()[f"{HEADS}{task}{LOG_VARIANCE}"]
    spread: Tensor = getattr(module, leaf)
    fit = loss / 2 if model.tasks[task].is_regression else loss
    return ((-spread).exp() * fit + spread / 2).sum()
