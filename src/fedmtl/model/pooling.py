"""One vector for a text out of one per token."""

from __future__ import annotations

from torch import Tensor


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean state [batch, width] of the real positions of [batch, position, width]."""
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)
