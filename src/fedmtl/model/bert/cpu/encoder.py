"""BERT from its values alone (Devlin et al. 2019, as transformers' BertModel computes it), for pooled vectors.

The same values and gradients as the module's, up to rounding, with less work: padding is dropped, and the last layer is
computed only at the position that is pooled. The backward pass is written out, so that each product is made once, in
memory that is there, and gradients are written into the tensors that the optimizer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedmtl.model.bert.cpu.encoder_pass import (
    Fed,
    Gradients,
    Kernels,
    Normed,
    Pass,
    Workspace,
    feed_forward,
    feed_forward_backward,
)
from fedmtl.model.bert.cpu.encoder_pass import kernels as kernels
from fedmtl.model.bert.cpu.first_position import First, first_backward, first_forward
from fedmtl.model.bert.layout import EVERYWHERE, WORDS, BertLayout, MaskSource, Packed

Take = Callable[..., Tensor]
PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Attended:
    """What the backward pass needs: queries, keys and values, as tokens or in their slots, and the probabilities."""

    parts: Tensor
    shares: Tensor
    mask: Tensor | None


class Attention:
    """Attention between the tokens of each row of one batch, by kernels where there are any.

    `width` is that of the probabilities, a little more than the batch's where that is faster.
    """

    def __init__(self, batch: Packed, num_heads: int, dtype: torch.dtype, kernels: Kernels | None) -> None:
        self.num_heads, self.num_rows = num_heads, batch.num_rows
        self._kernels = kernels
        if kernels:
            self.width = -(-batch.width // 16) * 16
            self._lengths = batch.mask.sum(1)
        else:
            self._slots = attention_slots(batch, num_heads, dtype)
            self.width = self._slots.width

    def forward(self, joint: Tensor, mask: Tensor | None, take: Take, take_saved: Take) -> tuple[Tensor, Attended]:
        """softmax(q k / sqrt(d)) v within each row, of (tokens, 3 * features) with q, k and v side by side.

        Tokens come out, `mask` multiplies the probabilities; `take_saved` gives the memory that `backward` reads,
        `joint` included.
        """
        if not self._kernels:
            return attend(joint, self._slots, mask, take, take_saved)
        size = joint.shape[1] // (3 * self.num_heads)
        shares = take_saved("shares", self.num_rows * self.num_heads, self.width, self.width)
        mixed = take_saved("mixed", len(joint), self.num_heads * size)
        scratch = take("heads_scratch", (size + self.width) * self.width)
        shape = (self.num_rows, self.num_heads, size, self.width)
        self._kernels.call("attend", *shape, self._lengths, joint, mask, shares, mixed, scratch)
        return mixed, Attended(joint, shares, mask)

    def backward(self, of: Attended, gradient: Tensor, take: Take) -> Tensor:
        """The gradient of `joint`; that of the outcome has one row more than there are tokens, which is zero."""
        if not self._kernels:
            return attend_backward(of, gradient, self._slots, take)
        size = of.parts.shape[1] // (3 * self.num_heads)
        out = take("by_joint", *of.parts.shape)
        scratch = take("heads_scratch", (size + 2 * self.width) * self.width)
        shape = (self.num_rows, self.num_heads, size, self.width)
        self._kernels.call(
            "attend_backward", *shape, self._lengths, of.parts, of.mask, of.shares, gradient, out, scratch
        )
        return out


@dataclass(frozen=True)
class AttentionSlots:
    """Where queries, keys and values of tokens go when they are cut into heads and padded: (3, rows, heads, width).

    `sources` says which head of which token fills each slot, padding being filled with the first token of its row;
    `spread` says the same for the queries alone, padding being filled with what follows the last token; `homes` says
    where each head of each token went. `bias` is 0 for a key that is there and minus infinity for padding.
    """

    num_heads: int
    width: int
    sources: Tensor
    spread: Tensor
    homes: Tensor
    bias: Tensor


def attention_slots(batch: Packed, num_heads: int, dtype: torch.dtype) -> AttentionSlots:
    rows, batch_width, width = batch.num_rows, batch.width, padded_width(batch.width)
    heads = torch.arange(num_heads)
    thirds = torch.arange(3)
    tokens = batch.firsts[:, None].repeat(1, width)
    tokens[:, :batch_width] = batch.sources.view(rows, batch_width)
    sources = tokens[:, None, :] * (3 * num_heads) + heads[:, None]
    real = torch.zeros((rows, width), dtype=torch.bool)
    real[:, :batch_width] = batch.mask != 0
    ends = torch.where(real, tokens, len(batch.ids))
    spread = ends[:, None, :] * num_heads + heads[:, None]
    first = batch.slots // batch_width * (num_heads * width) + batch.slots % batch_width
    homes = first[:, None, None] + thirds[:, None] * (rows * num_heads * width) + heads * width
    bias = torch.zeros((rows, width), dtype=dtype).masked_fill_(~real, -torch.inf)
    return AttentionSlots(
        num_heads,
        width,
        (sources + thirds[:, None, None, None] * num_heads).view(-1),
        spread.view(-1),
        homes.view(-1),
        bias.repeat_interleave(num_heads, 0).unsqueeze(1),
    )


def padded_width(width: int) -> int:
    """A little wider where small products are much faster: whole vectors of 16."""
    short = -width % 16
    return width + short if width < 16 or short < 4 else width


def attend(
    joint: Tensor, at: AttentionSlots, mask: Tensor | None, take: Take, take_saved: Take
) -> tuple[Tensor, Attended]:
    """By torch's operations."""
    size = joint.shape[1] // (3 * at.num_heads)
    heads = take_saved("heads", len(at.sources), size)
    torch.index_select(joint.view(-1, size), 0, at.sources, out=heads)
    q, k, v = heads = heads.view(3, -1, at.width, size)
    scores = take("scores", len(q), at.width, at.width)
    torch.baddbmm(at.bias, q, k.transpose(1, 2), alpha=size**-0.5, out=scores)
    shares = torch._softmax(scores, -1, False, out=take_saved("shares", *scores.shape))
    used = shares if mask is None else torch.mul(shares, mask, out=scores)
    mixed = torch.bmm(used, v, out=take("mixed_heads", *v.shape))
    homes = at.homes.view(-1, 3, at.num_heads)[:, 0].reshape(-1)
    out = take_saved("mixed", len(homes), size)
    torch.index_select(mixed.view(-1, size), 0, homes, out=out)
    return out.view(len(joint), -1), Attended(heads, shares, mask)


def attend_backward(of: Attended, gradient: Tensor, at: AttentionSlots, take: Take) -> Tensor:
    """By torch's operations."""
    (q, k, v), shares, size = of.parts, of.shares, of.parts.shape[-1]
    spread = torch.index_select(gradient.view(-1, size), 0, at.spread, out=take("mixed_heads", len(at.spread), size))
    spread = spread.view(q.shape)
    by_heads = take("by_heads", *of.parts.shape)
    by_share = take("scores", *shares.shape)
    used = shares if of.mask is None else torch.mul(shares, of.mask, out=by_share)
    torch.bmm(used.transpose(1, 2), spread, out=by_heads[2])
    torch.bmm(spread, v.transpose(1, 2), out=by_share)
    if of.mask is not None:
        by_share.mul_(of.mask)
    by_score = torch._softmax_backward_data(by_share, shares, -1, shares.dtype, grad_input=by_share)
    by_heads[0].baddbmm_(by_score, k, beta=0, alpha=size**-0.5)
    by_heads[1].baddbmm_(by_score.transpose(1, 2), q, beta=0, alpha=size**-0.5)
    out = take("by_joint", len(at.homes), size)
    torch.index_select(by_heads.view(-1, size), 0, at.homes, out=out)
    return out.view(len(gradient) - 1, -1)


@dataclass(frozen=True)
class Layer:
    """What the backward pass needs; `weight` is that of queries, keys and values as one."""

    number: int
    hidden: Tensor
    weight: Tensor
    attended: Attended
    fed: Fed

    @property
    def out(self) -> Tensor:
        return self.fed.last.out


def layer_forward(run: Pass, attention: Attention, number: int, hidden: Tensor) -> Layer:
    """Compute one layer at every position: tokens to tokens."""
    width, narrow = hidden.shape[1], run.layout.attention_width
    names = [f"encoder.layer.{number}.attention.self.{part}" for part in PARTS]
    weight = run.take_saved(number, "joint_weight", 3 * narrow, width)
    torch.cat([run.weights[f"{name}.weight"] for name in names], out=weight)
    bias = torch.cat([run.weights[f"{name}.bias"] for name in names])
    joint = run.linear(weight, bias, hidden, run.take_saved(number, "joint", len(hidden), 3 * narrow))
    shape = (run.batch.num_rows * attention.num_heads, attention.width, attention.width)
    mask = run.masks(f"{number}.attention", shape, run.layout.attention_dropout)
    mixed, attended = attention.forward(joint, mask, run.take, partial(run.take_saved, number))
    return Layer(number, hidden, weight, attended, feed_forward(run, number, hidden, mixed))


def layer_backward(run: Pass, attention: Attention, layer: Layer, gradient: Tensor) -> Tensor:
    by_hidden, by_mixed = feed_forward_backward(run, layer.number, layer.fed, gradient)
    by_joint = attention.backward(layer.attended, by_mixed, run.take)
    names = [f"encoder.layer.{layer.number}.attention.self.{part}" for part in PARTS]
    run.joint_gradients(names, layer.hidden, by_joint)
    return run.by_inputs(layer.weight, by_joint, by_hidden, adds=True)


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
    indices = {"word": run.batch.ids, "token_type": run.batch.segments, "position": run.batch.positions}
    run.table_gradients({TABLE.format(kind): index for kind, index in indices.items()}, by_sum)


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
    """Return one vector per row: the pooler's (`pooler`), the first position's (`cls`) or the mean of the real ones.

    With `words`, it is one for each of the batch's words.
    """
    reached = {name: value for name, value in weights.items() if value.requires_grad and is_reached(name, pool)}
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
        vectors = forward(run, pool).vectors.clone()
    memory.spaces.append(space)
    return vectors


def is_reached(name: str, pool: str) -> bool:
    """Whether a vector that is pooled so depends on this value."""
    return not name.startswith("heads.") and (pool == "pooler" or not name.startswith("pooler."))


@dataclass(frozen=True)
class Trace:
    """What the backward pass needs, and what came of the forward pass."""

    embedded: Embedded
    attention: Attention
    layers: list[Layer]
    first: First | None
    vectors: Tensor


def forward(run: Pass, pool: str) -> Trace:
    """Compute one vector per row or word, in memory that the next pass computes in."""
    embedded = embed(run)
    hidden, layers = embedded.out, []
    attention = Attention(run.batch, run.layout.num_heads, run.dtype, _attention_kernels(run))
    for number in range(run.layout.num_layers - (pool not in EVERYWHERE)):
        layer = layer_forward(run, attention, number, hidden)
        hidden = layer.out
        if run.needs_backward:
            layers.append(layer)
    if pool == "mean":
        return Trace(embedded, attention, layers, None, _mean(run, hidden))
    if pool == WORDS:
        return Trace(embedded, attention, layers, None, hidden.index_select(0, _words(run)))
    first = first_forward(run, run.layout.num_layers - 1, hidden)
    if pool == "cls":
        return Trace(embedded, attention, layers, first, first.out)
    pooled = torch.addmm(run.weights["pooler.dense.bias"], first.out, run.weights["pooler.dense.weight"].t())
    return Trace(embedded, attention, layers, first, pooled.tanh_())


def _attention_kernels(run: Pass) -> Kernels | None:
    """They take heads of whole vectors."""
    return run.kernels if run.kernels and run.layout.head_size % (run.kernels.block // 2) == 0 else None


def backward(run: Pass, pool: str, trace: Trace, gradient: Tensor) -> None:
    """Write every wanted gradient, from the top down to the lowest value that has one."""
    if pool == "pooler":
        assert trace.first is not None
        gradient = torch.ops.aten.tanh_backward(gradient, trace.vectors)
        run.linear_gradients("pooler.dense", trace.first.out, gradient)
        gradient = gradient @ run.weights["pooler.dense.weight"]
    lowest = _lowest(run)
    if trace.first is None:
        gradient = _words_backward(run, gradient) if pool == WORDS else _mean_backward(run, gradient)
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


def _words(run: Pass) -> Tensor:
    assert run.batch.words is not None, "a batch of a task on words says where they are"
    return run.batch.words


def _words_backward(run: Pass, gradient: Tensor) -> Tensor:
    """Two words may have one token in common, so that what they pass back adds up."""
    return gradient.new_zeros((len(run.batch.ids), gradient.shape[1])).index_add_(0, _words(run), gradient)


def _rows(run: Pass) -> Tensor:
    return run.batch.slots // run.batch.width


def _counts(run: Pass, dtype: torch.dtype) -> Tensor:
    return run.batch.mask.sum(1, keepdim=True).to(dtype).clamp_(min=1.0)


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Pass, pool: str, memory: PassMemory, *values: Tensor) -> Tensor:
        ctx.run, ctx.pool, ctx.memory, ctx.num_given = run, pool, memory, len(values)
        ctx.trace = forward(run, pool)
        # A copy: it outlives the trace, and what is done with it must not reach that.
        vectors: Tensor = ctx.trace.vectors.clone()
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        run, trace = ctx.run, ctx.trace
        assert trace is not None, "a pass is followed back once"
        ctx.trace = None
        backward(run, ctx.pool, trace, gradient.contiguous())
        ctx.memory.spaces.append(run.space)
        fresh = [*run.gradients.fresh_in_order(), *[None] * ctx.num_given]
        return None, None, None, *fresh[: ctx.num_given]
