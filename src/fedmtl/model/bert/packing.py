"""What goes into the fast paths: batches without their padding, dropout masks, and the mean over a text's positions.

A packed batch has all real tokens end to end and says where each one belongs. A mask says what each value is
multiplied by: 0 with probability p and 1 / (1 - p) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# site, shape, p -> a mask, or None where nothing is dropped.
MaskSource = Callable[[str, tuple[int, ...], float], Tensor | None]


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch that was padded on the right.

    `slots` says which slot of the padded batch, flattened, each token stands in; `sources` says which token fills
    each slot, padding being filled with the first token of its row.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    mask: Tensor
    firsts: Tensor
    slots: Tensor
    sources: Tensor

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    def pad(self, tokens: Tensor) -> Tensor:
        """(tokens, features) -> (rows, width, features)."""
        return tokens.index_select(0, self.sources).view(self.num_rows, self.width, -1)


def pack(ids: Tensor, mask: Tensor, segments: Tensor) -> Packed:
    """Drop the padding on a CPU, where work is proportional to tokens; a GPU would have to wait for the lengths."""
    rows, width = ids.shape
    columns = torch.arange(width, device=ids.device)
    if ids.device.type != "cpu":
        slots = torch.arange(rows * width, device=ids.device)
        return Packed(ids.reshape(-1), segments.reshape(-1), slots % width, mask, slots[::width].clone(), slots, slots)
    lengths = mask.sum(1)
    firsts = torch.cumsum(lengths, 0) - lengths
    slots = mask.reshape(-1).nonzero().squeeze(1)
    sources = (firsts[:, None] + columns * mask).reshape(-1)
    return Packed(ids.reshape(-1)[slots], segments.reshape(-1)[slots], slots % width, mask, firsts, slots, sources)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean state [batch, width] of the real positions of [batch, position, width]."""
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)


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
    survives = drawn > edge
    undecided = np.flatnonzero(drawn == edge)
    survives[undecided] = np.random.Generator(bits).random(len(undecided)) >= p * 256 - edge
    scaled = np.multiply(survives, 1.0 / (1.0 - p), dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(scaled).view(shape)
