"""Clipped and noisy updates, a filter of another package: an illustration, without a privacy guarantee.

    import update_noise                            # registers it
    fedmtl.run({"tasks": {...}, "methods": {"update_noise": {"max_norm": 1.0, "noise": 0.01}}})

Before an update leaves its client, it is scaled down to the norm `max_norm` where it is longer, and every number gets
Gaussian noise of the standard deviation `noise`. The noise derives from the job's seed, which the server knows and so
can take off again, and nothing counts what is spent.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat

from fedmtl import Capability, Config, Extra, FilterClient, Update, UpdateFilter, register


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_norm: PositiveFloat = 1.0
    noise: NonNegativeFloat = 0.0


class UpdateNoise(UpdateFilter):
    name = "update_noise"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = Options(**options)

    def conflict(self, config: Config) -> str | None:
        if config.wire.up != "fp32" and config.wire.error_feedback:
            return "wire.error_feedback would add to an update after it is clipped; write `error_feedback: false`"
        return None

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in update.delta.values()))
        factor = min(1.0, self._options.max_norm / norm) if norm else 1.0
        generator, delta = torch.Generator().manual_seed(client.job.seed), {}
        # Sorted, so that the noise does not depend on the order in which an engine has the values.
        for key, value in sorted(update.delta.items()):
            drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            delta[key] = value * factor + self._options.noise * drawn
        return replace(update, delta=delta), Extra()


register(Capability("update_noise", update_filter=UpdateNoise, options=Options))
