"""The values of several clients in buffers, a row per client, and the optimizer's step on them.

Every client has a learning rate and a clipping factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedmtl.training.local_method import LocalSettings

ALIGNED = 64


@dataclass(frozen=True)
class Block:
    """Values that step alike, as (clients, values) in fp32, with a copy in the dtype that is computed in.

    `clients` are the stack's rows that have them. `decay` is per value, `factor` multiplies the learning rate.
    """

    clients: slice
    spans: Mapping[str, tuple[slice, tuple[int, ...]]]
    values: Tensor
    before: Tensor
    computed: Tensor
    gradients: Tensor
    slots: tuple[Tensor, ...]
    decay: Tensor
    factor: float

    @property
    def num_clients(self) -> int:
        return len(self.values)

    def joined(self, of: Tensor, names: Sequence[str]) -> Tensor:
        """Parameters that are neighbours, in one of the block's buffers: (clients, all their rows, ...)."""
        spans = [self.spans[name] for name in names]
        assert all(first.stop == second.start for (first, _), (second, _) in pairwise(spans))
        shape = (sum(shape[0] for _, shape in spans), *spans[0][1][1:])
        return of[:, spans[0][0].start : spans[-1][0].stop].view(len(of), *shape)

    def load(self, buffer: Tensor, row: int, name: str, value: Tensor) -> None:
        """Put a client's value into one of the buffers; one that is smaller (a table of fewer rows) fills the front."""
        span, _ = self.spans[name]
        row_values = buffer[row, span]
        row_values[: value.numel()].copy_(value.reshape(-1), non_blocking=True)
        row_values[value.numel() :].zero_()

    def part(self, buffer: Tensor, row: int, name: str, like: Tensor) -> Tensor:
        """A client's value in one of the buffers, of the shape that was put in."""
        start = self.spans[name][0].start
        return buffer[row, start : start + like.numel()].view(like.shape)

    def begin(self) -> None:
        """What was loaded is where this training starts."""
        self.before.copy_(self.values)
        if self.computed is not self.values:
            self.computed.copy_(self.values)
        for buffer in (self.gradients, *self.slots):
            buffer.zero_()


def make_block(
    shapes: Mapping[str, tuple[int, ...]],
    clients: slice,
    decays: Mapping[str, float],
    factor: float,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    master: torch.dtype,
    taken: torch.dtype,
) -> Block:
    spans: dict[str, tuple[slice, tuple[int, ...]]] = {}
    total = 0
    for name, shape in shapes.items():
        spans[name] = (slice(total, total + prod(shape)), shape)
        total += prod(shape)
    rows = clients.stop - clients.start
    # Rows begin where memory is read in whole pieces.
    total = -(-total // ALIGNED) * ALIGNED

    def buffer(kind: torch.dtype = master) -> Tensor:
        return torch.zeros(rows, total, dtype=kind, device=device)

    values = buffer()
    decay = torch.zeros(total, dtype=master, device=device)
    for name, (span, _) in spans.items():
        decay[span] = decays[name]
    return Block(
        clients,
        spans,
        values,
        buffer(),
        values if dtype == master else buffer(dtype),
        buffer(taken),
        tuple(buffer() for _ in range(num_slots)),
        decay,
        factor,
    )


def squares(blocks: Sequence[Block], num_clients: int) -> Tensor:
    """Return the squared norm of every client's gradient."""
    total = torch.zeros(num_clients, dtype=blocks[0].values.dtype, device=blocks[0].values.device)
    for block in blocks:
        total[block.clients] += torch.linalg.vector_norm(block.gradients, dim=1, dtype=total.dtype).square()
    return total


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
        from fedmtl.training.stacked.triton_adamw import step_fused
    except ImportError:
        return None
    return step_fused
