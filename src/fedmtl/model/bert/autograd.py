"""BERT from its values alone (Devlin et al. 2019, as transformers' BertModel computes it), for pooled vectors.

By autograd, on any device; `bert/cpu` is the same for a CPU with the backward pass written out.

The same values as the module's, up to rounding, with less work: padding is dropped, the last layer is computed
only at the position that is pooled, and there the keys and values of the other positions are never formed:
q (W x) = (W' q) x, and a mean of W x is W of the mean. Attention is written out, forward and back, so that cutting
into heads and padding are one gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmtl.model.bert.layout import EVERYWHERE, WORDS, BertLayout, MaskSource, Packed, mean_pool

NamedWeights = Mapping[str, Tensor]


class CalledWeights(dict[str, Tensor]):
    """Weights whose modules are called for every linear layer, norm and table, so that hooks see them.

    The last layer is then computed at every position.
    """

    def __init__(self, weights: NamedWeights, module: nn.Module) -> None:
        super().__init__(weights)
        self._module = module

    def call(self, name: str, inputs: Tensor) -> Tensor:
        output: Tensor = self._module.get_submodule(name)(inputs)
        return output


@dataclass(frozen=True)
class HeadSlots:
    """How tokens cut into heads (rows of one table) map to slots of the padded batch: (rows, heads, width) end to end.

    `sources` says which row fills each slot, `slots` which slot each row went to; `bias` is 0 for a key that is
    there and minus infinity for padding.
    """

    sources: Tensor
    slots: Tensor
    bias: Tensor
    num_heads: int
    width: int


def head_slots(batch: Packed, num_heads: int, dtype: torch.dtype) -> HeadSlots:
    rows, width = batch.num_rows, batch.width
    heads = torch.arange(num_heads, device=batch.ids.device)
    sources = (batch.sources.view(rows, 1, width) * num_heads + heads[:, None]).view(-1)
    first = batch.slots // width * (num_heads * width) + batch.slots % width
    slots = (first[:, None] + heads * width).view(-1)
    bias = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.ids.device)
    bias.masked_fill_(batch.mask == 0, -torch.inf)
    return HeadSlots(sources, slots, bias, num_heads, width)


def attend(query: Tensor, key: Tensor, value: Tensor, at: HeadSlots, mask: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d)) v within each row; tokens in, tokens out. `mask` multiplies the probabilities."""
    mixed: Tensor = _Attention.apply(query, key, value, at, mask)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    """Attention with its backward pass written out, so that cutting into heads and padding are one gather."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, at: HeadSlots, mask: Tensor | None) -> Tensor:
        size = query.shape[1] // at.num_heads
        q, k, v = (_pad(part, at, size) for part in (query, key, value))
        bias = at.bias.repeat_interleave(at.num_heads, 0).unsqueeze(1)
        shares = torch.softmax(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5), -1)
        used = shares if mask is None else shares * mask
        ctx.save_for_backward(q, k, v, shares, used, mask)
        ctx.at, ctx.size = at, size
        return _unpad(torch.bmm(used, v), at, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, shares, used, mask = ctx.saved_tensors
        at, size = ctx.at, ctx.size
        # Padded queries answered nobody: their gradient is zero.
        padded = torch.zeros_like(q)
        padded.view(-1, size).index_copy_(0, at.slots, gradient.reshape(-1, size))
        by_value = torch.bmm(used.transpose(1, 2), padded)
        by_score = torch.bmm(padded, v.transpose(1, 2))
        if mask is not None:
            by_score.mul_(mask)
        by_score.mul_(shares)
        by_score.addcmul_(shares, by_score.sum(-1, keepdim=True), value=-1.0).mul_(size**-0.5)
        by_query, by_key = torch.bmm(by_score, k), torch.bmm(by_score.transpose(1, 2), q)
        return _unpad(by_query, at, size), _unpad(by_key, at, size), _unpad(by_value, at, size), None, None


def _pad(tokens: Tensor, at: HeadSlots, size: int) -> Tensor:
    return tokens.reshape(-1, size).index_select(0, at.sources).view(-1, at.width, size)


def _unpad(padded: Tensor, at: HeadSlots, size: int) -> Tensor:
    return padded.reshape(-1, size).index_select(0, at.slots).view(-1, at.num_heads * size)


def pooled_vectors(
    weights: NamedWeights,
    layout: BertLayout,
    batch: Packed,
    pool: str,
    masks: MaskSource,
    padding: int | None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return one vector per row: the pooler's (`pooler`), the first position's (`cls`) or the mean of the real ones.

    With `words`, it is one for each of the batch's words. `noise`, padded as the batch was, is added to the word
    embeddings.
    """
    heads = head_slots(batch, layout.num_heads, weights["embeddings.LayerNorm.weight"].dtype)
    hidden = _embed(weights, layout, batch, masks, padding, noise)
    is_called = isinstance(weights, CalledWeights)
    num_full = layout.num_layers if pool in EVERYWHERE or is_called else layout.num_layers - 1
    for number in range(num_full):
        hidden = _layer(weights, layout, batch, masks, number, hidden, heads)
    if pool == "mean":
        return mean_pool(batch.pad(hidden), batch.mask)
    if pool == WORDS:
        assert batch.words is not None, "a batch of a task on words says where they are"
        return hidden.index_select(0, batch.words)
    if is_called:
        first = hidden.index_select(0, batch.firsts)
    else:
        first = _first_position(weights, layout, batch, masks, layout.num_layers - 1, hidden, heads)
    return torch.tanh(_linear(weights, "pooler.dense", first)) if pool == "pooler" else first


def _embed(
    weights: NamedWeights,
    layout: BertLayout,
    batch: Packed,
    masks: MaskSource,
    padding: int | None,
    noise: Tensor | None,
) -> Tensor:
    table = "embeddings.{}_embeddings.weight"
    if isinstance(weights, CalledWeights):
        indices = {"word": batch.ids, "token_type": batch.segments, "position": batch.positions}
        hidden = torch.stack([weights.call(f"embeddings.{kind}_embeddings", at) for kind, at in indices.items()]).sum(0)
        hidden = _norm(weights, "embeddings.LayerNorm", hidden, layout)
        return _dropped(hidden, "embeddings", layout.hidden_dropout, masks)
    hidden = F.embedding(batch.ids, weights[table.format("word")], padding)
    if noise is not None:
        hidden = hidden + noise.reshape(-1, noise.shape[-1]).index_select(0, batch.slots)
    hidden = hidden + F.embedding(batch.segments, weights[table.format("token_type")])
    hidden = hidden + F.embedding(batch.positions, weights[table.format("position")])
    hidden = _norm(weights, "embeddings.LayerNorm", hidden, layout)
    return _dropped(hidden, "embeddings", layout.hidden_dropout, masks)


def _layer(
    weights: NamedWeights,
    layout: BertLayout,
    batch: Packed,
    masks: MaskSource,
    number: int,
    hidden: Tensor,
    heads: HeadSlots,
) -> Tensor:
    """Compute one layer at every position: tokens to tokens."""
    name = f"encoder.layer.{number}.attention.self"
    query, key, value = (_linear(weights, f"{name}.{part}", hidden) for part in ("query", "key", "value"))
    shape = (batch.num_rows * layout.num_heads, batch.width, batch.width)
    mixed = attend(query, key, value, heads, masks(f"{number}.attention", shape, layout.attention_dropout))
    return _feed_forward(weights, layout, masks, number, hidden, mixed)


def _first_position(
    weights: NamedWeights,
    layout: BertLayout,
    batch: Packed,
    masks: MaskSource,
    number: int,
    hidden: Tensor,
    slots: HeadSlots,
) -> Tensor:
    """Compute one layer at the first position of every row: tokens to rows."""
    name = f"encoder.layer.{number}.attention.self"
    rows, heads, size, width = batch.num_rows, layout.num_heads, layout.head_size, hidden.shape[1]
    first = hidden.index_select(0, batch.firsts)
    query = _linear(weights, f"{name}.query", first).view(rows, heads, size)
    key_weight = weights[f"{name}.key.weight"].view(heads, size, width)
    # (heads, rows, size) x (heads, size, width): the query as seen by the hidden states themselves.
    seen = torch.bmm(query.transpose(0, 1), key_weight).transpose(0, 1)
    # The same for all positions, so softmax drops it; it is here so that the bias has the module's gradient.
    constant = (query * weights[f"{name}.key.bias"].view(heads, size)).sum(-1, keepdim=True)
    padded = batch.pad(hidden)
    scores = (torch.bmm(seen, padded.transpose(1, 2)) + constant) * size**-0.5 + slots.bias.unsqueeze(1)
    shares = _dropped(torch.softmax(scores, -1), f"{number}.attention", layout.attention_dropout, masks)
    value_weight = weights[f"{name}.value.weight"].view(heads, size, width)
    mixed = torch.bmm(torch.bmm(shares, padded).transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)
    mixed = mixed + shares.sum(-1, keepdim=True) * weights[f"{name}.value.bias"].view(heads, size)
    return _feed_forward(weights, layout, masks, number, first, mixed.reshape(rows, -1))


def _feed_forward(
    weights: NamedWeights, layout: BertLayout, masks: MaskSource, number: int, hidden: Tensor, mixed: Tensor
) -> Tensor:
    """Compute what follows the attention in a layer, at the given positions."""
    name = f"encoder.layer.{number}"
    p = layout.hidden_dropout
    mixed = _linear(weights, f"{name}.attention.output.dense", mixed)
    hidden = _added(hidden, mixed, f"{number}.attention.output", p, masks)
    hidden = _norm(weights, f"{name}.attention.output.LayerNorm", hidden, layout)
    inner = F.gelu(_linear(weights, f"{name}.intermediate.dense", hidden))
    outer = _linear(weights, f"{name}.output.dense", inner)
    return _norm(weights, f"{name}.output.LayerNorm", _added(hidden, outer, f"{number}.output", p, masks), layout)


def _linear(weights: NamedWeights, name: str, inputs: Tensor) -> Tensor:
    if isinstance(weights, CalledWeights):
        return weights.call(name, inputs)
    return F.linear(inputs, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: NamedWeights, name: str, inputs: Tensor, layout: BertLayout) -> Tensor:
    if isinstance(weights, CalledWeights):
        return weights.call(name, inputs)
    return F.layer_norm(inputs, (inputs.shape[-1],), weights[f"{name}.weight"], weights[f"{name}.bias"], layout.epsilon)


def _dropped(inputs: Tensor, site: str, p: float, masks: MaskSource) -> Tensor:
    mask = masks(site, tuple(inputs.shape), p)
    return inputs if mask is None else inputs * mask


def _added(hidden: Tensor, addend: Tensor, site: str, p: float, masks: MaskSource) -> Tensor:
    """The residual sum, with dropout on the addend."""
    mask = masks(site, tuple(addend.shape), p)
    return hidden + addend if mask is None else torch.addcmul(hidden, addend, mask)
