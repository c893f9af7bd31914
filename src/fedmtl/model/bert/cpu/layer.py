"""One layer at every position, forward and back, with attention between the tokens of each row of a packed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedmtl.model.bert.cpu.encoder_pass import Fed, Pass, feed_forward, feed_forward_backward
from fedmtl.model.bert.cpu.native import Kernels
from fedmtl.model.bert.packing import Packed

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
    by_weight = run.by_weight(layer.hidden, by_joint, run.take("by_joint_weight", *layer.weight.shape))
    by_bias = by_joint.sum(0)
    for part, weight, bias in zip(PARTS, by_weight.chunk(3), by_bias.chunk(3), strict=True):
        name = f"encoder.layer.{layer.number}.attention.self.{part}"
        run.gradients.put(f"{name}.weight", weight)
        run.gradients.put(f"{name}.bias", bias)
    return run.by_inputs(layer.weight, by_joint, by_hidden, adds=True)
