"""Dropout masks: what each value is multiplied by, 0 with probability p and 1 / (1 - p) otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# site, shape, p -> a mask, or None where nothing is dropped.
MaskSource = Callable[[str, tuple[int, ...], float], Tensor | None]


def no_masks(site: str, shape: tuple[int, ...], p: float) -> Tensor | None:
    return None


def random_masks(like: Tensor) -> MaskSource:
    """Fresh masks of that tensor's dtype and device; all follow from torch's generator as it is now."""
    if like.device.type != "cpu":
        return lambda site, shape, p: _drawn_by_torch(like, shape, p)
    bits = np.random.SFC64(int(torch.randint(2**62, ()).item()))
    return lambda site, shape, p: _drawn_by_bytes(bits, like.dtype, shape, p)


def _drawn_by_torch(like: Tensor, shape: tuple[int, ...], p: float) -> Tensor | None:
    if not 0.0 < p < 1.0:
        return like.new_zeros(shape) if p >= 1.0 else None
    return like.new_empty(shape).bernoulli_(1.0 - p).div_(1.0 - p)


def _drawn_by_bytes(bits: np.random.SFC64, dtype: torch.dtype, shape: tuple[int, ...], p: float) -> Tensor | None:
    """One random byte per value, which decides unless it equals floor(256 p); those few draw 53 bits more.

    So each value is dropped with probability p exactly, at an eighth of the random bits of one draw each.
    """
    if not 0.0 < p < 1.0:
        return torch.zeros(shape, dtype=dtype) if p >= 1.0 else None
    size = math.prod(shape)
    edge = int(p * 256)
    drawn = bits.random_raw(-(-size // 8)).view(np.uint8)[:size]
    kept = drawn > edge
    undecided = np.flatnonzero(drawn == edge)
    kept[undecided] = np.random.Generator(bits).random(len(undecided)) >= p * 256 - edge
    scaled = np.multiply(kept, 1.0 / (1.0 - p), dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(scaled).view(shape)
