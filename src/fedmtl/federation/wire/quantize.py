"""Floats in fewer bits: 16-bit floats with a scale per tensor, 8-bit integers with a scale per block.

Both are deterministic: rounding is to nearest, and no sum is taken.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# The most values that share a scale, and the fewest for which a row is cut evenly.
LONGEST_BLOCK, SHORTEST_BLOCK = 128, 32
# Values quantized in one go: few enough to stay in a core's cache.
CHUNK = 1 << 16
LARGEST = 127
# Scales are the upper half of a 32-bit float. From this pattern on 127 times the scale would overflow.
SCALE_END = 0x7C00
SMALLEST_SCALE = 2.0**-100
# Multiplied by two to this power, the largest value of a tensor comes to lie below the largest 16-bit float, 65504.
HALF_TOP = 15
MOST_EXPONENT = 114


def block_length(shape: tuple[int, ...]) -> int:
    """How many values share a scale: an even part of a row, so that a row means the same in every slice."""
    width = shape[-1] if shape else 1
    for length in range(LONGEST_BLOCK, SHORTEST_BLOCK - 1, -1):
        if width % length == 0:
            return length
    return LONGEST_BLOCK


def to_int8(values: Tensor, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale of every block as upper float halves, and the values as multiples of it; flat float32 in."""
    padded = _padded(values, block)
    scales = torch.empty(len(padded), dtype=torch.float32)
    codes = torch.empty(padded.shape, dtype=torch.int8)
    step = max(1, CHUNK // block)
    for start in range(0, len(padded), step):
        part = padded[start : start + step]
        scale = _rounded_up(part.abs().amax(1).div_(LARGEST))
        scales[start : start + step] = scale
        # A block of zeros has scale 0, and 0 times anything but infinity is 0.
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        codes[start : start + step] = (part * inverse[:, None]).round_()
    halves = (scales.numpy().view(np.uint32) >> 16).astype(np.uint16)
    if bool((halves >= SCALE_END).any()):
        raise ValueError("holds values that are not numbers, or too large ones")
    return halves, codes.reshape(-1)[: len(values)].numpy()


def from_int8(halves: np.ndarray, codes: np.ndarray, block: int) -> Tensor:
    """The flat float32 values of `to_int8`."""
    scales = torch.from_numpy((halves.astype(np.uint32) << 16).view(np.float32))
    values = torch.empty(len(codes), dtype=torch.float32)
    source = torch.from_numpy(codes)
    values_whole, source_whole = _blocks(values, block), _blocks(source, block)
    step = max(1, CHUNK // block)
    for start in range(0, len(values_whole), step):
        part = values_whole[start : start + step]
        part.copy_(source_whole[start : start + step]).mul_(scales[start : start + len(part), None])
    rest = len(values_whole) * block
    if rest < len(values):
        values[rest:].copy_(source[rest:]).mul_(scales[-1])
    return values


def to_half(values: Tensor) -> tuple[int, np.ndarray]:
    """The exponent of a power of two, and the values times that power as 16-bit floats; flat float32 in.

    Without it small updates would fall among the subnormal numbers, and large ones overflow.
    """
    largest = max(map(abs, map(float, torch.aminmax(values)))) if len(values) else 0.0
    if not math.isfinite(largest):
        raise ValueError("holds values that are not numbers")
    exponent = HALF_TOP - max(math.frexp(largest)[1], HALF_TOP - MOST_EXPONENT)
    halves = torch.empty(len(values), dtype=torch.float16)
    for start in range(0, len(values), CHUNK):
        halves[start : start + CHUNK] = values[start : start + CHUNK] * 2.0**exponent
    return exponent, halves.numpy()


def from_half(exponent: int, halves: np.ndarray) -> Tensor:
    """The flat float32 values of `to_half`."""
    return torch.from_numpy(halves).float().mul_(2.0**-exponent)


def _padded(values: Tensor, block: int) -> Tensor:
    missing = -len(values) % block
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, block)


def _blocks(values: Tensor, block: int) -> Tensor:
    """The whole blocks, as a view."""
    return values[: len(values) // block * block].view(-1, block)


def _rounded_up(scales: Tensor) -> Tensor:
    """The next float whose lower half is zero, so that no value is past 127; tiny scales become 0."""
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    bits = scales.numpy().view(np.uint32)
    return torch.from_numpy(((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32))
