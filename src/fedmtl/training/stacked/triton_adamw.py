"""AdamW for clients at once in Triton kernels: for a block of values, and for the token rows that a batch uses.

In a block every value is read and written once. A token row without a gradient still moves, by its momentum. What it
missed is made up for when a batch uses it again, step by step at the rates of those steps, and at the end for all: the
same values up to rounding, while a step reads and writes some hundred rows of a client's table instead of all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedmtl.training.local_method import LocalSettings
from fedmtl.training.stacked.blocks import Block

SIZE = 2048
# A mean that has shrunk to this share of itself moves nothing any more that fp32 could show.
NOTHING = 1e-10


@triton.jit
def _adamw(
    values, computed, gradients, mean, square, decay, rate, first, second, clip,
    n, factor, beta1, beta2, epsilon,
    HAS_COPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    client_rate = tl.load(rate + client)
    if client_rate >= 0:
        column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = column < n
        at = client.to(tl.int64) * n + column
        value = tl.load(values + at, mask=inside)
        gradient = tl.load(gradients + at, mask=inside).to(tl.float32)
        gradient *= tl.load(clip + client)
        client_rate *= factor
        m = tl.load(mean + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        m += (1 - beta1) * (gradient - m)
        v = beta2 * v + (1 - beta2) * gradient * gradient
        value *= 1 - client_rate * tl.load(decay + column, mask=inside)
        value -= client_rate / tl.load(first + client) * m / (tl.sqrt(v) / tl.load(second + client) + epsilon)
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


@triton.jit
def _catch_up(
    rows, last, values, computed, mean, square, history, now, num_clients, num_rows, limit,
    beta1, beta2, log_beta2, epsilon,
    ALL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Make the steps that a row has missed; `rows` are sorted, and the first of equal ones does the work."""
    index = tl.program_id(0)
    if ALL:
        row = index.to(tl.int64)
        is_first = True
    else:
        row = tl.load(rows + index).to(tl.int64)
        is_first = row != tl.load(rows + index - 1, mask=index > 0, other=-1)
    if is_first:
        begin, end = tl.load(last + row), tl.load(now)
        if begin < end:
            column = tl.arange(0, BLOCK)
            inside = column < WIDTH
            at = row * WIDTH + column
            m = tl.load(mean + at, mask=inside, other=0.0)
            v = tl.load(square + at, mask=inside, other=0.0)
            if tl.max(tl.abs(m), 0) > 0:
                value = tl.load(values + at, mask=inside, other=0.0)
                client_history = history + row // num_rows
                stop = tl.minimum(end, begin + limit)
                step = begin
                while step < stop:
                    rate = tl.load(client_history + 3 * step * num_clients)
                    if rate >= 0:
                        first = tl.load(client_history + (3 * step + 1) * num_clients)
                        second = tl.load(client_history + (3 * step + 2) * num_clients)
                        m *= beta1
                        v *= beta2
                        value -= rate / first * m / (tl.sqrt(v) / second + epsilon)
                    step += 1
                shrunk = tl.where(stop < end, 0.0, 1.0)
                tl.store(mean + at, m * shrunk, mask=inside)
                tl.store(values + at, value, mask=inside)
                if HAS_COPY:
                    tl.store(computed + at, value.to(computed.dtype.element_ty), mask=inside)
                begin = stop
            v *= tl.exp2((end - begin).to(tl.float32) * log_beta2)
            tl.store(square + at, v, mask=inside)
            tl.store(last + row, end)


@triton.jit
def _sum_rows(rows, order, gradients, sums, squares, num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of every row that is used, at the first token that uses it; and its square."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    total = 0.0
    if row != tl.load(rows + index - 1, mask=index > 0, other=-1):
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        added = tl.zeros((BLOCK,), tl.float32)
        other = index
        while tl.load(rows + other, mask=other < num_tokens, other=-1) == row:
            at = tl.load(order + other) * WIDTH + column
            added += tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
            other += 1
        tl.store(sums + index.to(tl.int64) * WIDTH + column, added, mask=inside)
        total = tl.sum(added * added, 0)
    tl.store(squares + index, total)


@triton.jit
def _step_rows(
    rows, last, values, computed, mean, square, sums, rate, first, second, clip, now,
    num_rows, factor, beta1, beta2, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index)
    client = row // num_rows
    client_rate = tl.load(rate + client) * factor
    if client_rate >= 0 and row != tl.load(rows + index - 1, mask=index > 0, other=-1):
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        at = row.to(tl.int64) * WIDTH + column
        gradient = tl.load(sums + index.to(tl.int64) * WIDTH + column, mask=inside, other=0.0)
        gradient *= tl.load(clip + client)
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        value = tl.load(values + at, mask=inside, other=0.0)
        m += (1 - beta1) * (gradient - m)
        v = beta2 * v + (1 - beta2) * gradient * gradient
        value -= client_rate / tl.load(first + client) * m / (tl.sqrt(v) / tl.load(second + client) + epsilon)
        tl.store(values + at, value, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        if HAS_COPY:
            tl.store(computed + at, value.to(computed.dtype.element_ty), mask=inside)
        tl.store(last + row, tl.load(now) + 1)


class LazyRows:
    """The rows of a block that holds the token tables alone, one client's after the other's.

    `history` (steps, 3, clients) are the rates of the steps made so far and AdamW's corrections at them, which whoever
    makes steps fills in before each; `now` counts them.
    """

    def __init__(self, block: Block, num_rows: int, num_steps: int, settings: LocalSettings) -> None:
        self._block, self._num_rows, self._settings = block, num_rows, settings
        device = block.values.device
        self._width = block.values.numel() // (block.num_clients * num_rows)
        assert block.values.shape[1] == num_rows * self._width, "a client's rows fill its part of the buffer"
        self._last = torch.zeros(block.num_clients * num_rows, dtype=torch.int32, device=device)
        self.history = torch.zeros(num_steps, 3, block.num_clients, device=device)
        self.now = torch.zeros((), dtype=torch.int32, device=device)
        beta = settings.betas[0]
        self._limit = math.ceil(math.log(NOTHING) / math.log(beta)) if beta > 0 else 1
        self._shape = {
            "WIDTH": self._width,
            "BLOCK": triton.next_power_of_2(self._width),
            "HAS_COPY": block.computed is not block.values,
            "num_warps": max(1, min(4, self._width // 64)),
        }

    def begin(self) -> None:
        self._last.zero_()
        self.now.zero_()

    def open(self, ids: Tensor) -> None:
        """Bring the rows that a step uses to where they are by now."""
        # Half the digits take half the time to sort.
        self._rows, self._order = ids.to(torch.int32).sort(stable=True)
        self._make_up(self._rows, len(ids))

    def take(self, gradients: Tensor) -> None:
        """Add up the gradients of the tokens that were given to `open`."""
        self._sums = torch.empty(gradients.shape, dtype=torch.float32, device=gradients.device)
        self._squares = torch.empty(len(gradients), dtype=torch.float32, device=gradients.device)
        _sum_rows[(len(gradients),)](
            self._rows, self._order, gradients.contiguous(), self._sums, self._squares, len(gradients),
            WIDTH=self._width, BLOCK=self._shape["BLOCK"], num_warps=self._shape["num_warps"],
        )  # fmt: skip

    def squares(self) -> Tensor:
        """Return the squared norm of every client's gradient."""
        return self._squares.view(self._block.num_clients, -1).sum(1)

    def step(self, rates: Any) -> None:
        """Move the rows that were used; a client without a rate stays."""
        settings = self._settings
        _step_rows[(len(self._rows),)](
            self._rows, self._last, *self._buffers(), self._sums, rates.rate, rates.first, rates.second, rates.clip,
            self.now, self._num_rows, self._block.factor, *settings.betas, settings.epsilon, **self._shape,
        )  # fmt: skip
        self.now.add_(1)

    def finish(self) -> None:
        """Bring all rows to where they are by now."""
        self._make_up(self._last, len(self._last), every=True)

    def _make_up(self, rows: Tensor, count: int, *, every: bool = False) -> None:
        settings = self._settings
        _catch_up[(count,)](
            rows, self._last, *self._buffers(), self.history, self.now, self._block.num_clients, self._num_rows,
            self._limit, *settings.betas, math.log2(max(settings.betas[1], 1e-30)), settings.epsilon,
            ALL=every, **self._shape,
        )  # fmt: skip

    def _buffers(self) -> tuple[Tensor, ...]:
        return self._block.values, self._block.computed, *self._block.slots
