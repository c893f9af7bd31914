"""The learning rate over a whole training; within a round it goes on from step to step."""

from __future__ import annotations

import math

from fedmtl.training.settings import LocalSettings


def rate_factor(settings: LocalSettings, rounds_done: float) -> float:
    """What the base rate is multiplied by after `rounds_done` rounds, which may be a fraction."""
    warmup = settings.warmup_rounds
    if rounds_done >= warmup and settings.schedule == "step":
        return settings.step_factor ** math.floor((rounds_done - warmup) / settings.step_rounds)
    return scheduled(settings.schedule, rounds_done, settings.num_rounds, warmup)


def scheduled(schedule: str, done: float, total: float, warmup: float) -> float:
    """Up in a line while `done` is below `warmup`, then constant, or down to 0 at `total`: linear, or in a cosine."""
    if done < warmup:
        return done / warmup
    if schedule == "constant":
        return 1.0
    left = total - warmup
    progress = min(1.0, (done - warmup) / left) if left > 0 else 1.0
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
