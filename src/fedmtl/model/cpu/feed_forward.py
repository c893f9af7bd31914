"""A layer's part after the attention, forward and back, at whichever positions are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.cpu.encoder_pass import Normed, Pass


@dataclass(frozen=True)
class Fed:
    """What the backward pass needs."""

    mixed: Tensor
    middle: Normed
    before: Tensor
    inner: Tensor
    last: Normed


def feed_forward(run: Pass, number: int, hidden: Tensor, mixed: Tensor) -> Fed:
    """`last.out` is the layer's outcome for the positions whose states and mixed values are given."""
    name, p, shape = f"encoder.layer.{number}", run.layout.hidden_dropout, tuple(hidden.shape)
    added = run.linear_by_name(f"{name}.attention.output.dense", mixed, run.kept(number, "added", *shape))
    mask = run.masks(f"{number}.attention.output", shape, p)
    middle = run.add_norm(number, f"{name}.attention.output.LayerNorm", added, hidden, mask)
    wide = len(hidden), len(run.values[f"{name}.intermediate.dense.bias"])
    before = run.linear_by_name(f"{name}.intermediate.dense", middle.out, run.kept(number, "before", *wide))
    inner = torch.ops.aten.gelu.out(before, out=run.kept(number, "inner", *wide))
    outer = run.linear_by_name(f"{name}.output.dense", inner, run.kept(number, "outer", *shape))
    mask = run.masks(f"{number}.output", shape, p)
    last = run.add_norm(number, f"{name}.output.LayerNorm", outer, middle.out, mask)
    return Fed(mixed, middle, before, inner, last)


def feed_forward_backward(run: Pass, number: int, fed: Fed, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `hidden` and of `mixed`; the latter has one row more, which is zero."""
    name = f"encoder.layer.{number}"
    rows = len(gradient)
    by_sum, by_outer = run.norm_backward(fed.last, gradient, "by_last")
    run.linear_gradients(f"{name}.output.dense", fed.inner, by_outer)
    by_inner = run.take("by_inner", *fed.inner.shape)
    run.by_inputs(run.values[f"{name}.output.dense.weight"], by_outer, by_inner)
    torch.ops.aten.gelu_backward.grad_input(by_inner, fed.before, grad_input=by_inner)
    run.linear_gradients(f"{name}.intermediate.dense", fed.middle.out, by_inner)
    run.by_inputs(run.values[f"{name}.intermediate.dense.weight"], by_inner, by_sum, adds=True)
    by_sum, by_added = run.norm_backward(fed.middle, by_sum, "by_middle")
    run.linear_gradients(f"{name}.attention.output.dense", fed.mixed, by_added)
    by_mixed = run.take("by_mixed", rows + 1, run.layout.attention_width)
    run.by_inputs(run.values[f"{name}.attention.output.dense.weight"], by_added, by_mixed[:rows])
    by_mixed[rows:].zero_()
    return by_sum, by_mixed
