"""Attention between the tokens of each row of a packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmtl.model.packing import Packed


@dataclass(frozen=True)
class HeadPlaces:
    """Tokens cut into heads, as rows of one table, and the same padded: (rows, heads, width) end to end.

    `sources` says which of the first fills each of the second, `places` where each of the first went; `bias` is 0 for
    a key that is there and minus infinity for padding.
    """

    sources: Tensor
    places: Tensor
    bias: Tensor
    num_heads: int
    width: int


def head_places(batch: Packed, num_heads: int, dtype: torch.dtype) -> HeadPlaces:
    rows, width = batch.num_rows, batch.width
    heads = torch.arange(num_heads, device=batch.ids.device)
    sources = (batch.sources.view(rows, 1, width) * num_heads + heads[:, None]).view(-1)
    first = batch.places // width * (num_heads * width) + batch.places % width
    places = (first[:, None] + heads * width).view(-1)
    bias = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.ids.device)
    bias.masked_fill_(batch.mask == 0, -torch.inf)
    return HeadPlaces(sources, places, bias, num_heads, width)


def attend(query: Tensor, key: Tensor, value: Tensor, at: HeadPlaces, mask: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d)) v within each row; tokens in, tokens out. `mask` multiplies the probabilities."""
    mixed: Tensor = _Attention.apply(query, key, value, at, mask)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    """By hand, so that cutting into heads and padding are one gather, forward and back."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, at: HeadPlaces, mask: Tensor | None) -> Tensor:
        size = query.shape[1] // at.num_heads
        q, k, v = (_pad(part, at, size) for part in (query, key, value))
        bias = at.bias.repeat_interleave(at.num_heads, 0).unsqueeze(1)
        shares = torch.softmax(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5), -1)
        kept = shares if mask is None else shares * mask
        ctx.save_for_backward(q, k, v, shares, kept, mask)
        ctx.at, ctx.size = at, size
        return _unpad(torch.bmm(kept, v), at, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, shares, kept, mask = ctx.saved_tensors
        at, size = ctx.at, ctx.size
        # Padded queries answered nobody: their gradient is zero.
        padded = torch.zeros_like(q)
        padded.view(-1, size).index_copy_(0, at.places, gradient.reshape(-1, size))
        by_value = torch.bmm(kept.transpose(1, 2), padded)
        by_score = torch.bmm(padded, v.transpose(1, 2))
        if mask is not None:
            by_score.mul_(mask)
        by_score.mul_(shares)
        by_score.addcmul_(shares, by_score.sum(-1, keepdim=True), value=-1.0).mul_(size**-0.5)
        by_query, by_key = torch.bmm(by_score, k), torch.bmm(by_score.transpose(1, 2), q)
        return _unpad(by_query, at, size), _unpad(by_key, at, size), _unpad(by_value, at, size), None, None


def _pad(tokens: Tensor, at: HeadPlaces, size: int) -> Tensor:
    return tokens.reshape(-1, size).index_select(0, at.sources).view(-1, at.width, size)


def _unpad(padded: Tensor, at: HeadPlaces, size: int) -> Tensor:
    return padded.reshape(-1, size).index_select(0, at.places).view(-1, at.num_heads * size)
