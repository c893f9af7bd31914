"""R-Drop (Liang et al. 2021), a loss term of another package: two passes with different dropout should agree.

    import rdrop                                   # registers it
    fedmtl.run({"tasks": {...}, "methods": {"rdrop": {"weight": 1.0}}})

The second pass adds its loss and `weight` times the symmetric divergence between both; the mean of the two losses
keeps the scale of one.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat
from torch import Tensor

from fedmtl import Capability, Extra, LocalClient, LocalMethod, LocalStep, divergences, register


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: PositiveFloat = 1.0


class RDrop(LocalMethod):
    name = "rdrop"
    more_passes = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._weight = Options(**options).weight

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._model = client.bound.model

    def loss(self, step: LocalStep, outputs: Tensor, loss: Tensor) -> Tensor:
        again = self._model(step.task, step.inputs)
        apart = divergences(self._model.tasks[step.task], outputs, again).mean()
        return (loss + step.labelled(again)) / 2 + self._weight * apart


register(Capability("rdrop", RDrop, options=Options))
