"""The last layer at the first position of every row, forward and back.

There the keys and values of the other positions are never formed: q (W x) = (W' q) x, and a mean of W x is W of the
mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedmtl.model.cpu import first_attention
from fedmtl.model.cpu.encoder_pass import Pass
from fedmtl.model.cpu.feed_forward import Fed, feed_forward, feed_forward_backward


@dataclass(frozen=True)
class First:
    """What the backward pass needs."""

    number: int
    hidden: Tensor
    first: Tensor
    query: Tensor
    mask: Tensor | None
    attended: Any
    fed: Fed

    @property
    def out(self) -> Tensor:
        return self.fed.last.out


def first_forward(run: Pass, number: int, hidden: Tensor) -> First:
    """Tokens in, rows out."""
    name = f"encoder.layer.{number}.attention.self"
    rows, heads = run.batch.num_rows, run.layout.num_heads
    first = hidden.index_select(0, run.batch.firsts)
    query = run.linear_by_name(f"{name}.query", first, run.kept(number, "query", rows, run.layout.attention_width))
    mask = run.masks(f"{number}.attention", (rows, heads, run.batch.width), run.layout.attention_dropout)
    attend = first_attention.attend_by_kernels if _has_kernels(run, hidden) else first_attention.attend
    mixed, attended = attend(run, name, hidden, query, mask)
    return First(number, hidden, first, query, mask, attended, feed_forward(run, number, first, mixed))


def first_backward(run: Pass, of: First, gradient: Tensor) -> Tensor:
    """Rows in, tokens out."""
    name = f"encoder.layer.{of.number}.attention.self"
    by_first, by_mixed = feed_forward_backward(run, of.number, of.fed, gradient)
    backward = first_attention.backward_by_kernels if _has_kernels(run, of.hidden) else first_attention.backward
    by_hidden, by_query = backward(run, name, of.hidden, of.query, of.mask, of.attended, by_mixed[: len(of.first)])
    run.linear_gradients(f"{name}.query", of.first, by_query)
    run.by_inputs(run.values[f"{name}.query.weight"], by_query, by_first, adds=True)
    return by_hidden.index_add_(0, run.batch.firsts, by_first)


def _has_kernels(run: Pass, hidden: Tensor) -> bool:
    """They take heads of whole vectors, which together are as wide as the hidden states."""
    width = hidden.shape[1]
    return (
        run.kernels is not None
        and run.kernels.fits(width)
        and width == run.layout.attention_width
        and run.layout.head_size % (run.kernels.block // 2) == 0
    )
