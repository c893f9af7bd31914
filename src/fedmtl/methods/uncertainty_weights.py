"""Loss weights that are learnt: Kendall, Gal and Cipolla 2018, Multi-Task Learning Using Uncertainty to Weigh Losses.

With s the log of a task's variance, a classification adds exp(-s) L + s/2 to what is minimised, a regression
exp(-s) L/2 + s/2. At its best exp(s) is 2 L, or L for a regression. The variance is a parameter of the task's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Config
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.plan import HEADS, LOG_VARIANCE, Extra, SharingPlan
from fedmtl.training.local_method import LocalClient, LocalMethod

NAME = "uncertainty_weights"


class UncertaintyWeights(LocalMethod):
    """Weighs each task's loss by its learnt variance; the model has the task's values when a loss is weighed."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._model: MultiTaskModel | None = None

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._model = client.bound.model

    def weigh(self, task: str, loss: Tensor) -> Tensor:
        assert self._model is not None
        module, leaf = self._model.canonical()[f"{HEADS}{task}{LOG_VARIANCE}"]
        spread: Tensor = getattr(module, leaf)
        fit = loss * self._model.tasks[task].kind_of.likelihood_factor
        return ((-spread).exp() * fit + spread / 2).sum()


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    return {} if config.training.loss_weighting == "uncertainty" else None


CAPABILITY = Capability(NAME, UncertaintyWeights, _client_options)
