"""The learning rate over all rounds of a run; within a round it goes on from step to step."""

from __future__ import annotations

import math

from fedmtl.training.settings import LocalSettings


def rate_factor(settings: LocalSettings, rounds_done: float) -> float:
    """What the base rate is multiplied by after `rounds_done` rounds, which may be a fraction."""
    warmup = settings.warmup_rounds
    if rounds_done < warmup:
        return rounds_done / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "step":
        return settings.step_factor ** math.floor((rounds_done - warmup) / settings.step_rounds)
    left = settings.num_rounds - warmup
    progress = min(1.0, (rounds_done - warmup) / left) if left > 0 else 1.0
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
