"""Gaussian noise for gradients of several clients in one Triton kernel: Philox, then Box and Muller's normal numbers.

What is drawn follows from a client's key, the number of the step and the place of a value, and not from what else the
device computes: a run that is resumed draws the same numbers. A key of 64 bits is enough for a simulation, whose
server knows all; a site that hides its gradients from others draws from `noise.KeyedNoise`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

# Values of one program, which draws four at a time.
SIZE = 2048
_TURN = tl.constexpr(2 * math.pi * 2.0**-32)


@triton.jit
def _pair(first, second):
    """Two independent normal numbers from 32 bits each; 31 bits with a half are never 0, and largest is 6.7."""
    uniform = ((first & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(uniform), 0.0))
    angle = second.to(tl.int32, bitcast=True).to(tl.float32) * _TURN
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _add(of, values, at, inside):
    tl.store(of + at, (tl.load(of + at, mask=inside) + values).to(of.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["step"])
def _add_noise(gradients, stride, start, count, keys, deviations, weights, rates, step, QUARTER: tl.constexpr):
    client = tl.program_id(1)
    deviation = tl.load(deviations + client) * tl.load(weights + client)
    if (deviation > 0) & (tl.load(rates + client) >= 0):
        lane = tl.program_id(0) * QUARTER + tl.arange(0, QUARTER)
        # Keys are random, so that no two of a run are neighbours.
        a, b, c, d = tl.randint4x(tl.load(keys + client) + step, lane)
        first, second = _pair(a, b)
        third, fourth = _pair(c, d)
        place = tl.program_id(0) * (4 * QUARTER) + tl.arange(0, QUARTER)
        of = gradients + client.to(tl.int64) * stride + start
        _add(of, first * deviation, place, place < count)
        _add(of, second * deviation, place + QUARTER, place + QUARTER < count)
        _add(of, third * deviation, place + 2 * QUARTER, place + 2 * QUARTER < count)
        _add(of, fourth * deviation, place + 3 * QUARTER, place + 3 * QUARTER < count)


def add_noise(
    gradients: Tensor, span: slice, keys: Tensor, deviations: Tensor, weights: Tensor, rates: Tensor, step: int
) -> None:
    """Add the noise of a step to these columns of (clients, values); a client with a negative rate gets none."""
    count = span.stop - span.start
    _add_noise[(triton.cdiv(count, SIZE), len(gradients))](
        gradients, gradients.stride(0), span.start, count, keys, deviations, weights, rates, step,
        QUARTER=SIZE // 4, num_warps=4,
    )  # fmt: skip
