"""The optimizer's step on a block, every client with a rate and a clipping factor of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedmtl.training.settings import LocalSettings
from fedmtl.training.stacked.blocks import Block


@dataclass(frozen=True)
class Rates:
    """One value per client of the stack; a negative rate is no step."""

    rate: Tensor
    first: Tensor
    second: Tensor
    clip: Tensor


def step_block(block: Block, rates: Rates, settings: LocalSettings) -> None:
    """Move the block's values; AdamW and SGD as in torch."""
    kernel = fused_kernel() if block.values.device.type == "cuda" and settings.optimizer == "adamw" else None
    if kernel is not None:
        kernel(block, rates, settings)
    else:
        _step_plainly(block, rates, settings)


def _step_plainly(block: Block, rates: Rates, settings: LocalSettings) -> None:
    rate, first, second, clip = (
        part[block.clients, None] for part in (rates.rate, rates.first, rates.second, rates.clip)
    )
    active = rate >= 0
    rate = rate.clamp(min=0) * block.factor
    gradients = block.gradients * clip
    if settings.optimizer == "adamw":
        mean, square = block.slots
        decayed = block.values * (1 - rate * block.decay)
        _keep(mean, torch.lerp(mean, gradients, 1 - settings.betas[0]), active)
        _keep(square, settings.betas[1] * square + (1 - settings.betas[1]) * gradients * gradients, active)
        moved = decayed - rate / first * mean / (square.sqrt() / second + settings.epsilon)
    else:
        direction = gradients + block.decay * block.values
        if block.slots:
            _keep(block.slots[0], settings.momentum * block.slots[0] + direction, active)
            direction = block.slots[0]
        moved = block.values - rate * direction
    _keep(block.values, moved, active)
    if block.computed is not block.values:
        block.computed.copy_(block.values)


def _keep(old: Tensor, new: Tensor, active: Tensor) -> None:
    old.copy_(torch.where(active, new, old))


@cache
def fused_kernel() -> Any:
    """AdamW in one pass over memory, or None where Triton is missing."""
    try:
        from fedmtl.training.stacked.fused_adamw import step_fused
    except ImportError:
        return None
    return step_fused
