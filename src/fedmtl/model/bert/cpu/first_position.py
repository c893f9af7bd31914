"""The last layer at the first position of every row, forward and back, by kernels or by torch.

There the keys and values of the other positions are never formed: q (W x) = (W' q) x, and a mean of W x is W of the
mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmtl.model.bert.cpu.encoder_pass import Fed, Pass, feed_forward, feed_forward_backward

Compiled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Seen:
    """What the backward pass needs: the query as seen by the hidden states, and what came of it."""

    seen: Tensor
    padded: Tensor
    shares: Tensor
    used: Tensor
    means: Tensor


def attend_by_torch(run: Pass, name: str, hidden: Tensor, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Seen]:
    """Return the mixed values of the rows, and what the backward pass needs."""
    rows, heads, size, width = run.batch.num_rows, run.layout.num_heads, run.layout.head_size, hidden.shape[1]
    by_head = query.view(rows, heads, size)
    seen = torch.bmm(by_head.transpose(0, 1), _cut(run, f"{name}.key.weight")).transpose(0, 1).contiguous()
    # The same for all positions, so softmax drops it; it is here so that the bias has the module's gradient.
    constant = (by_head * run.weights[f"{name}.key.bias"].view(heads, size)).sum(-1, keepdim=True)
    padded = run.take_saved(name, "padded", rows * run.batch.width, width)
    torch.index_select(hidden, 0, run.batch.sources, out=padded)
    padded = padded.view(rows, -1, width)
    scores = torch.bmm(seen, padded.transpose(1, 2)).add_(constant).mul_(size**-0.5)
    scores.masked_fill_(run.batch.mask.unsqueeze(1) == 0, -torch.inf)
    shares = torch.softmax(scores, -1)
    used = shares if mask is None else shares * mask
    means = torch.bmm(used, padded)
    mixed = torch.bmm(means.transpose(0, 1), _cut(run, f"{name}.value.weight").transpose(1, 2))
    mixed = mixed.transpose(0, 1) + used.sum(-1, keepdim=True) * run.weights[f"{name}.value.bias"].view(heads, size)
    return mixed.reshape(rows, -1), Seen(seen, padded, shares, used, means)


def backward_by_torch(
    run: Pass, name: str, hidden: Tensor, query: Tensor, mask: Tensor | None, of: Seen, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the hidden states and of the queries."""
    heads, size, width = run.layout.num_heads, run.layout.head_size, hidden.shape[1]
    gradient = gradient.view(len(gradient), heads, size)
    by_means, by_total = _value_backward(run, f"{name}.value", of, gradient)
    by_used = torch.bmm(by_means, of.padded.transpose(1, 2)).add_(by_total)
    by_share = by_used if mask is None else by_used.mul_(mask)
    by_score = torch._softmax_backward_data(by_share, of.shares, -1, of.shares.dtype).mul_(size**-0.5)
    by_query = _key_backward(run, f"{name}.key", of, query.view(-1, heads, size), by_score)
    # Two sums of products over the heads, as one.
    by_position = torch.cat([by_score, of.used], 1).transpose(1, 2)
    by_padded = torch.bmm(by_position, torch.cat([of.seen, by_means], 1), out=run.take("by_padded", *of.padded.shape))
    by_hidden = run.take("by_hidden", *hidden.shape)
    torch.index_select(by_padded.view(-1, width), 0, run.batch.slots, out=by_hidden)
    return by_hidden, by_query


def _value_backward(run: Pass, name: str, of: Seen, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the mean states and of the shares' sums."""
    by_head = gradient.transpose(0, 1)
    run.head_gradients(name, of.means, gradient, of.used.sum(-1, keepdim=True))
    by_means = torch.bmm(by_head, _cut(run, f"{name}.weight")).transpose(0, 1)
    by_total = (gradient * run.weights[f"{name}.bias"].view(gradient.shape[1:])).sum(-1, keepdim=True)
    return by_means.contiguous(), by_total


def _key_backward(run: Pass, name: str, of: Seen, query: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of the queries, as rows."""
    by_seen = torch.bmm(gradient, of.padded)
    by_constant = gradient.sum(-1, keepdim=True)
    run.head_gradients(name, by_seen, query, by_constant)
    by_query = torch.bmm(by_seen.transpose(0, 1), _cut(run, f"{name}.weight").transpose(1, 2)).transpose(0, 1)
    return (by_query + by_constant * run.weights[f"{name}.bias"].view(query.shape[1:])).reshape(len(query), -1)


def _cut(run: Pass, name: str) -> Tensor:
    """Return a weight as (heads, size, width)."""
    weight = run.weights[name]
    return weight.view(run.layout.num_heads, -1, weight.shape[1])


def attend_by_kernels(
    run: Pass, name: str, hidden: Tensor, query: Tensor, mask: Tensor | None
) -> tuple[Tensor, Compiled]:
    assert run.kernels is not None
    rows, heads, width = run.batch.num_rows, run.layout.num_heads, hidden.shape[1]
    shape = (rows, heads, width // heads, run.batch.width)
    lengths = run.batch.mask.sum(1)
    seen, means = (run.take_saved(name, part, rows * heads, width) for part in ("seen", "means"))
    shares = run.take_saved(name, "first_shares", rows * heads, run.batch.width)
    totals = run.take_saved(name, "totals", rows * heads)
    mixed = run.take_saved(name, "mixed", rows, width)
    run.kernels.call(
        "first_attend", *shape, lengths, hidden, query, *_values(run, name), mask, seen, shares, means, totals, mixed,
        run.take("first_scratch", width * width // heads + run.batch.width),
    )  # fmt: skip
    return mixed, (lengths, seen, shares, means, totals)


def backward_by_kernels(
    run: Pass, name: str, hidden: Tensor, query: Tensor, mask: Tensor | None, of: Compiled, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    assert run.kernels is not None
    rows, heads, width = run.batch.num_rows, run.layout.num_heads, hidden.shape[1]
    lengths, *saved = of
    by_hidden, by_query = run.take("by_hidden", *hidden.shape), run.take("by_query", rows, width)
    names = [f"{name}.{part}" for part in ("key.weight", "key.bias", "value.weight", "value.bias")]
    results = [run.writable(part) for part in names]
    by_means, by_seen = (run.take(part, rows * heads, width) for part in ("by_means", "by_seen"))
    run.kernels.call(
        "first_attend_backward", rows, heads, width // heads, run.batch.width, lengths, hidden, query,
        *_values(run, name), mask, *saved, gradient, by_hidden, by_query, *results,
        by_means, by_seen, run.take("first_scratch", width * width // heads + run.batch.width),
    )  # fmt: skip
    _, _, means, totals = saved
    shape = rows, heads, -1
    run.made_head_gradients(f"{name}.value", means.view(shape), gradient.view(shape), totals.view(shape))
    # Softmax drops what all keys have in common, so that their bias has no gradient.
    run.made_head_gradients(f"{name}.key", by_seen.view(shape), query.view(shape), torch.zeros_like(totals).view(shape))
    return by_hidden, by_query


def _values(run: Pass, name: str) -> list[Tensor]:
    return [run.weights[f"{name}.{part}"] for part in ("key.weight", "key.bias", "value.weight", "value.bias")]


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
    """Compute the layer at the first position of every row: tokens to rows."""
    name = f"encoder.layer.{number}.attention.self"
    rows, heads = run.batch.num_rows, run.layout.num_heads
    first = hidden.index_select(0, run.batch.firsts)
    query = run.linear_by_name(
        f"{name}.query", first, run.take_saved(number, "query", rows, run.layout.attention_width)
    )
    mask = run.masks(f"{number}.attention", (rows, heads, run.batch.width), run.layout.attention_dropout)
    attend = attend_by_kernels if _has_kernels(run, hidden) else attend_by_torch
    mixed, attended = attend(run, name, hidden, query, mask)
    return First(number, hidden, first, query, mask, attended, feed_forward(run, number, first, mixed))


def first_backward(run: Pass, of: First, gradient: Tensor) -> Tensor:
    """Return the gradient of the tokens from that of the rows, and write those of the weights."""
    name = f"encoder.layer.{of.number}.attention.self"
    by_first, by_mixed = feed_forward_backward(run, of.number, of.fed, gradient)
    backward = backward_by_kernels if _has_kernels(run, of.hidden) else backward_by_torch
    by_hidden, by_query = backward(run, name, of.hidden, of.query, of.mask, of.attended, by_mixed[: len(of.first)])
    run.linear_gradients(f"{name}.query", of.first, by_query)
    run.by_inputs(run.weights[f"{name}.query.weight"], by_query, by_first, adds=True)
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
