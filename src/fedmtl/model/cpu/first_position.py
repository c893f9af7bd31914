"""The last layer at the first position of every row, forward and back.

There the keys and values of the other positions are never formed: q (W x) = (W' q) x, and a mean of W x is W of the
mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.cpu.encoder_pass import Pass
from fedmtl.model.cpu.feed_forward import Fed, feed_forward, feed_forward_backward


@dataclass(frozen=True)
class First:
    """What the backward pass needs; `seen` is the query as seen by the hidden states themselves."""

    number: int
    first: Tensor
    query: Tensor
    seen: Tensor
    padded: Tensor
    shares: Tensor
    mask: Tensor | None
    used: Tensor
    means: Tensor
    fed: Fed

    @property
    def out(self) -> Tensor:
        return self.fed.last.out


def first_forward(run: Pass, number: int, hidden: Tensor) -> First:
    """Tokens in, rows out."""
    name = f"encoder.layer.{number}.attention.self"
    rows, heads, width = run.batch.num_rows, run.layout.num_heads, hidden.shape[1]
    size = width // heads
    first = hidden.index_select(0, run.batch.firsts)
    query = torch.addmm(run.values[f"{name}.query.bias"], first, run.values[f"{name}.query.weight"].t())
    query = query.view(rows, heads, size)
    seen = torch.bmm(query.transpose(0, 1), _by_head(run, f"{name}.key.weight", heads)).transpose(0, 1).contiguous()
    # The same for all positions, so softmax drops it; kept so that the bias has the module's gradient.
    constant = (query * run.values[f"{name}.key.bias"].view(heads, size)).sum(-1, keepdim=True)
    padded = run.kept(number, "padded", rows * run.batch.width, width)
    torch.index_select(hidden, 0, run.batch.sources, out=padded)
    padded = padded.view(rows, -1, width)
    bias = run.places.bias.view(rows, heads, -1)[..., : run.batch.width]
    scores = torch.bmm(seen, padded.transpose(1, 2)).add_(constant).mul_(size**-0.5).add_(bias)
    shares = torch.softmax(scores, -1)
    mask = run.mask(f"{number}.attention", tuple(shares.shape), run.layout.attention_dropout)
    used = shares if mask is None else shares * mask
    means = torch.bmm(used, padded)
    mixed = torch.bmm(means.transpose(0, 1), _by_head(run, f"{name}.value.weight", heads).transpose(1, 2))
    mixed = mixed.transpose(0, 1) + used.sum(-1, keepdim=True) * run.values[f"{name}.value.bias"].view(heads, size)
    fed = feed_forward(run, number, first, mixed.reshape(rows, width))
    return First(number, first, query, seen, padded, shares, mask, used, means, fed)


def first_backward(run: Pass, of: First, gradient: Tensor) -> Tensor:
    """Rows in, tokens out."""
    rows, heads, size = of.query.shape
    name = f"encoder.layer.{of.number}.attention.self"
    by_first, by_mixed = feed_forward_backward(run, of.number, of.fed, gradient)
    by_mixed = by_mixed[:rows].view(rows, heads, size)
    by_means, by_total = _value_backward(run, f"{name}.value", of, by_mixed)
    by_used = torch.bmm(by_means, of.padded.transpose(1, 2)).add_(by_total)
    by_share = by_used if of.mask is None else by_used.mul_(of.mask)
    by_score = torch._softmax_backward_data(by_share, of.shares, -1, of.shares.dtype).mul_(size**-0.5)
    by_query = _key_backward(run, f"{name}.key", of, by_score)
    run.linear_gradients(f"{name}.query", of.first, by_query)
    by_first.addmm_(by_query, run.values[f"{name}.query.weight"])
    # Two sums of products over the heads, as one.
    by_position = torch.cat([by_score, of.used], 1).transpose(1, 2)
    by_padded = torch.bmm(by_position, torch.cat([of.seen, by_means], 1), out=run.take("by_padded", *of.padded.shape))
    width = of.padded.shape[-1]
    by_hidden = run.take("by_hidden", len(run.batch.places), width)
    torch.index_select(by_padded.view(-1, width), 0, run.batch.places, out=by_hidden)
    return by_hidden.index_add_(0, run.batch.firsts, by_first)


def _value_backward(run: Pass, name: str, of: First, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the mean states and of the shares' sums."""
    heads, size = gradient.shape[1:]
    by_head = gradient.transpose(0, 1)
    run.gradients.put(f"{name}.weight", torch.bmm(by_head.transpose(1, 2), of.means.transpose(0, 1)))
    run.gradients.put(f"{name}.bias", (gradient * of.used.sum(-1, keepdim=True)).sum(0))
    by_means = torch.bmm(by_head, _by_head(run, f"{name}.weight", heads)).transpose(0, 1)
    by_total = (gradient * run.values[f"{name}.bias"].view(heads, size)).sum(-1, keepdim=True)
    return by_means.contiguous(), by_total


def _key_backward(run: Pass, name: str, of: First, gradient: Tensor) -> Tensor:
    """The gradient of the queries, as rows."""
    rows, heads, size = of.query.shape
    by_seen = torch.bmm(gradient, of.padded).transpose(0, 1)
    by_constant = gradient.sum(-1, keepdim=True)
    run.gradients.put(f"{name}.weight", torch.bmm(of.query.permute(1, 2, 0), by_seen))
    run.gradients.put(f"{name}.bias", (of.query * by_constant).sum(0))
    by_query = torch.bmm(by_seen, _by_head(run, f"{name}.weight", heads).transpose(1, 2)).transpose(0, 1)
    return (by_query + by_constant * run.values[f"{name}.bias"].view(heads, size)).reshape(rows, -1)


def _by_head(run: Pass, name: str, heads: int) -> Tensor:
    weight = run.values[name]
    return weight.view(heads, -1, weight.shape[1])
