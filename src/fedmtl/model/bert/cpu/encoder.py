"""BERT from its values alone (Devlin et al. 2019, as transformers' BertModel computes it), for pooled vectors.

The same values and gradients as the module's, up to rounding, with less work: padding is dropped, and the last layer is
computed only at the position that is pooled. The backward pass is written out, so that each product is made once, in
memory that is there, and gradients are written into the tensors that the optimizer reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedmtl.model.bert.cpu.encoder_pass import Gradients, Normed, Pass, Workspace
from fedmtl.model.bert.cpu.first_position import First, first_backward, first_forward
from fedmtl.model.bert.cpu.layer import Attention, Layer, layer_backward, layer_forward
from fedmtl.model.bert.cpu.native import Kernels, kernels
from fedmtl.model.bert.layout import BertLayout
from fedmtl.model.bert.packing import MaskSource, Packed

TABLE = "embeddings.{}_embeddings.weight"


@dataclass(frozen=True)
class Embedded:
    """What the backward pass needs."""

    normed: Normed
    mask: Tensor | None
    out: Tensor


def embed(run: Pass) -> Embedded:
    summed = _gather(run, "word", run.batch.ids, "embedded")
    summed.add_(_gather(run, "token_type", run.batch.segments, "addend"))
    summed.add_(_gather(run, "position", run.batch.positions, "addend"))
    normed = run.add_norm("embeddings", "embeddings.LayerNorm", summed, None, None)
    mask = run.masks("embeddings", tuple(summed.shape), run.layout.hidden_dropout)
    out = normed.out if mask is None else normed.out.mul_(mask)
    return Embedded(normed, mask, out)


def embed_backward(run: Pass, of: Embedded, gradient: Tensor) -> None:
    """All gradients that are left; the one given is used up."""
    by_sum, _ = run.norm_backward(of.normed, gradient if of.mask is None else gradient.mul_(of.mask), "by_last")
    for kind, index in (("word", run.batch.ids), ("token_type", run.batch.segments), ("position", run.batch.positions)):
        if run.gradients.wants(TABLE.format(kind)):
            table = run.gradients.into(TABLE.format(kind)).zero_().index_add_(0, index, by_sum)
            if kind == "word" and run.padding is not None:
                table[run.padding] = 0.0


def _gather(run: Pass, kind: str, index: Tensor, buffer: str) -> Tensor:
    table = run.weights[TABLE.format(kind)]
    return torch.index_select(table, 0, index, out=run.take(buffer, len(index), table.shape[1]))


@dataclass
class PassMemory:
    """What outlives a pass: memory to compute in, and the tensors that store gradients, by canonical name.

    Gradients with such a tensor are written into it, over what was there; the others are added to the parameters'
    as autograd does.
    """

    spaces: list[Workspace] = field(default_factory=list)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


def pooled_vectors(
    weights: Mapping[str, Tensor],
    layout: BertLayout,
    batch: Packed,
    pool: str,
    masks: MaskSource,
    padding: int | None,
    memory: PassMemory,
) -> Tensor:
    """Return one vector per row: the pooler's (`pooler`), the first position's (`cls`) or the mean of the real ones."""
    reached = {name: value for name, value in weights.items() if value.requires_grad and _is_reached(name, pool)}
    # A pass that is never followed back takes its memory with it; then the next one makes new.
    space = memory.spaces.pop() if memory.spaces else Workspace()
    gradients = Gradients(reached, memory.gradients)
    needs_backward = bool(reached) and torch.is_grad_enabled()
    compiled = kernels(weights["embeddings.LayerNorm.weight"].dtype)
    run = Pass(weights, layout, batch, masks, padding, space, gradients, needs_backward, compiled)
    if needs_backward:
        # Autograd need only know of values whose gradients it is given, and of one in any case.
        given = [value for name, value in reached.items() if name not in memory.gradients]
        given = given or list(reached.values())[:1]
        vectors: Tensor = _Encoded.apply(run, pool, memory, *given)  # type: ignore[no-untyped-call]
        return vectors
    with torch.no_grad():
        # A copy: the next pass computes in the same memory.
        vectors = _forward(run, pool).vectors.clone()
    memory.spaces.append(space)
    return vectors


def _is_reached(name: str, pool: str) -> bool:
    return not name.startswith("heads.") and (pool == "pooler" or not name.startswith("pooler."))


@dataclass(frozen=True)
class _Trace:
    embedded: Embedded
    attention: Attention
    layers: list[Layer]
    first: First | None
    vectors: Tensor


def _forward(run: Pass, pool: str) -> _Trace:
    embedded = embed(run)
    hidden, layers = embedded.out, []
    attention = Attention(run.batch, run.layout.num_heads, run.dtype, _attention_kernels(run))
    for number in range(run.layout.num_layers - (pool != "mean")):
        layer = layer_forward(run, attention, number, hidden)
        hidden = layer.out
        if run.needs_backward:
            layers.append(layer)
    if pool == "mean":
        return _Trace(embedded, attention, layers, None, _mean(run, hidden))
    first = first_forward(run, run.layout.num_layers - 1, hidden)
    if pool == "cls":
        return _Trace(embedded, attention, layers, first, first.out)
    pooled = torch.addmm(run.weights["pooler.dense.bias"], first.out, run.weights["pooler.dense.weight"].t())
    return _Trace(embedded, attention, layers, first, pooled.tanh_())


def _attention_kernels(run: Pass) -> Kernels | None:
    """They take heads of whole vectors."""
    return run.kernels if run.kernels and run.layout.head_size % (run.kernels.block // 2) == 0 else None


def _backward(run: Pass, pool: str, trace: _Trace, gradient: Tensor) -> None:
    """Write every wanted gradient, from the top down to the lowest value that has one."""
    if pool == "pooler":
        assert trace.first is not None
        gradient = torch.ops.aten.tanh_backward(gradient, trace.vectors)
        run.linear_gradients("pooler.dense", trace.first.out, gradient)
        gradient = gradient @ run.weights["pooler.dense.weight"]
    lowest = _lowest(run)
    if trace.first is None:
        gradient = _mean_backward(run, gradient)
    elif trace.first.number >= lowest:
        gradient = first_backward(run, trace.first, gradient)
    for layer in reversed(trace.layers):
        if layer.number >= lowest:
            gradient = layer_backward(run, trace.attention, layer, gradient)
    if lowest < 0:
        embed_backward(run, trace.embedded, gradient)


def _lowest(run: Pass) -> int:
    """The lowest layer with a wanted gradient, counting the embeddings as layer -1."""
    if run.gradients.wants_any("embeddings."):
        return -1
    layers = range(run.layout.num_layers)
    return next((n for n in layers if run.gradients.wants_any(f"encoder.layer.{n}.")), len(layers))


def _mean(run: Pass, hidden: Tensor) -> Tensor:
    sums = hidden.new_zeros((run.batch.num_rows, hidden.shape[1])).index_add_(0, _rows(run), hidden)
    return sums.div_(_counts(run, hidden.dtype))


def _mean_backward(run: Pass, gradient: Tensor) -> Tensor:
    return (gradient / _counts(run, gradient.dtype)).index_select(0, _rows(run))


def _rows(run: Pass) -> Tensor:
    return run.batch.slots // run.batch.width


def _counts(run: Pass, dtype: torch.dtype) -> Tensor:
    return run.batch.mask.sum(1, keepdim=True).to(dtype).clamp_(min=1.0)


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Pass, pool: str, memory: PassMemory, *values: Tensor) -> Tensor:
        ctx.run, ctx.pool, ctx.memory, ctx.num_given = run, pool, memory, len(values)
        ctx.trace = _forward(run, pool)
        # A copy: it outlives the trace, and what is done with it must not reach that.
        vectors: Tensor = ctx.trace.vectors.clone()
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        run, trace = ctx.run, ctx.trace
        assert trace is not None, "a pass is followed back once"
        ctx.trace = None
        _backward(run, ctx.pool, trace, gradient.contiguous())
        ctx.memory.spaces.append(run.space)
        fresh = [*run.gradients.fresh_in_order(), *[None] * ctx.num_given]
        return None, None, None, *fresh[: ctx.num_given]
