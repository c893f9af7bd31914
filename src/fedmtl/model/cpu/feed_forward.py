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
    mixed_mask: Tensor | None
    middle: Normed
    before: Tensor
    inner: Tensor
    outer_mask: Tensor | None
    last: Normed


def feed_forward(run: Pass, number: int, hidden: Tensor, mixed: Tensor) -> Fed:
    """`last.out` is the layer's outcome for the positions whose states and mixed values are given."""
    name, p = f"encoder.layer.{number}", run.layout.hidden_dropout
    added = run.linear(f"{name}.attention.output.dense", mixed, run.kept(number, "added", *hidden.shape))
    mixed_mask = _add(run, f"{number}.attention.output", added, hidden, p)
    middle = run.norm(f"{name}.attention.output.LayerNorm", added)
    wide = len(hidden), len(run.values[f"{name}.intermediate.dense.bias"])
    before = run.linear(f"{name}.intermediate.dense", middle.out, run.kept(number, "before", *wide))
    inner = torch.ops.aten.gelu.out(before, out=run.kept(number, "inner", *wide))
    outer = run.linear(f"{name}.output.dense", inner, run.kept(number, "outer", *hidden.shape))
    outer_mask = _add(run, f"{number}.output", outer, middle.out, p)
    last = run.norm(f"{name}.output.LayerNorm", outer)
    return Fed(mixed, mixed_mask, middle, before, inner, outer_mask, last)


def feed_forward_backward(run: Pass, number: int, fed: Fed, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `hidden` and of `mixed`; the latter has one row more, which is zero."""
    name = f"encoder.layer.{number}"
    rows, width = gradient.shape
    by_sum = run.norm_backward(fed.last, gradient)
    by_outer = _dropped(by_sum, fed.outer_mask, run.take("by_added", rows, width))
    run.linear_gradients(f"{name}.output.dense", fed.inner, by_outer)
    by_inner = torch.mm(by_outer, run.values[f"{name}.output.dense.weight"], out=run.take("by_inner", *fed.inner.shape))
    torch.ops.aten.gelu_backward.grad_input(by_inner, fed.before, grad_input=by_inner)
    run.linear_gradients(f"{name}.intermediate.dense", fed.middle.out, by_inner)
    by_sum.addmm_(by_inner, run.values[f"{name}.intermediate.dense.weight"])
    by_sum = run.norm_backward(fed.middle, by_sum)
    by_added = _dropped(by_sum, fed.mixed_mask, run.take("by_added", rows, width))
    run.linear_gradients(f"{name}.attention.output.dense", fed.mixed, by_added)
    by_mixed = run.take("by_mixed", rows + 1, width)
    torch.mm(by_added, run.values[f"{name}.attention.output.dense.weight"], out=by_mixed[:rows])
    by_mixed[rows:].zero_()
    return by_sum, by_mixed


def _add(run: Pass, site: str, addend: Tensor, hidden: Tensor, p: float) -> Tensor | None:
    """Make the addend the residual sum, with dropout on the addend; the mask is needed again."""
    mask = run.mask(site, tuple(addend.shape), p)
    if mask is None:
        addend.add_(hidden)
    else:
        torch.addcmul(hidden, addend, mask, out=addend)
    return mask


def _dropped(gradient: Tensor, mask: Tensor | None, out: Tensor) -> Tensor:
    return gradient if mask is None else torch.mul(gradient, mask, out=out)
