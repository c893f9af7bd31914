"""AdamW for a block of clients in one Triton kernel: every value is read and written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fedmtl.training.settings import LocalSettings
from fedmtl.training.stacked.blocks import Block

SIZE = 2048


@triton.jit
def _adamw(
    values, computed, gradients, mean, square, decay, rate, first, second, clip,
    n, factor, beta1, beta2, epsilon,
    HAS_COPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    own_rate = tl.load(rate + client)
    if own_rate >= 0:
        column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = column < n
        at = client.to(tl.int64) * n + column
        value = tl.load(values + at, mask=inside)
        gradient = tl.load(gradients + at, mask=inside).to(tl.float32)
        gradient *= tl.load(clip + client)
        own_rate *= factor
        m = tl.load(mean + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        m += (1 - beta1) * (gradient - m)
        v = beta2 * v + (1 - beta2) * gradient * gradient
        value *= 1 - own_rate * tl.load(decay + column, mask=inside)
        value -= own_rate / tl.load(first + client) * m / (tl.sqrt(v) / tl.load(second + client) + epsilon)
        tl.store(values + at, value, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        if HAS_COPY:
            tl.store(computed + at, value.to(computed.dtype.element_ty), mask=inside)


def step_fused(block: Block, rates: Any, settings: LocalSettings) -> None:
    n = block.values.shape[1]
    rows = block.clients
    _adamw[(triton.cdiv(n, SIZE), block.num_clients)](
        block.values, block.computed, block.gradients, *block.slots, block.decay,
        rates.rate[rows], rates.first[rows], rates.second[rows], rates.clip[rows],
        n, block.factor, settings.betas[0], settings.betas[1], settings.epsilon,
        HAS_COPY=block.computed is not block.values, SIZE=SIZE, num_warps=8,
    )  # fmt: skip
