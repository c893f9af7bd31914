"""BERT for several clients at once: the computation of `bert/autograd.py` with a client axis in front of every value.

The products of all clients become one batched product, which is what a GPU needs to be busy with small encoders.
Tokens are packed: each client has a fixed number of positions, with its sequences end to end in the first of them. What
is computed at the positions after them is never looked at.

The computation is written once, here; its parts come from torch's operations (`PlainOps`: any device, any dtype)
or, on a GPU, from `bert/triton_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl.model.bert.layout import EVERYWHERE, WORDS, BertLayout

POSITIONS, SEGMENTS = (f"embeddings.{kind}_embeddings.weight" for kind in ("position", "token_type"))


@dataclass(frozen=True)
class StackedBatch:
    """One batch of every client: (clients, tokens) of ids, (clients, sequences) of where the sequences are.

    `owners` says which sequence a token belongs to; padding after the last sequence belongs to one past it. No
    sequence is longer than `width`.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    owners: Tensor
    starts: Tensor
    lengths: Tensor
    width: int

    def global_starts(self) -> Tensor:
        """Return where sequences begin in all clients' tokens end to end."""
        clients = torch.arange(len(self.starts), device=self.starts.device)
        return self.starts + clients[:, None] * self.ids.shape[1]


@dataclass(frozen=True)
class Leaf:
    """(clients, *shape) of some values, and the tensor for their gradients; None where they take none."""

    value: Tensor
    gradient: Tensor | None


# Names of values that lie side by side -> one leaf for all of them.
Leaves = Callable[[tuple[str, ...]], Leaf]


class Ops(Protocol):
    """The parts of the computation; hidden states are (clients, tokens or sequences, width)."""

    def embed(self, words: Tensor) -> Tensor:
        """Words plus positions plus segments, normalized, then some dropped."""

    def attend(self, layer: str, hidden: Tensor) -> Tensor:
        """Attention within each sequence, at every token."""

    def firsts(self, hidden: Tensor) -> Tensor:
        """The hidden states of every sequence's first token."""

    def attend_firsts(self, layer: str, first: Tensor, hidden: Tensor) -> Tensor:
        """Attention within each sequence, at its first token."""

    def norm_sum(self, dense: str, norm: str, inputs: Tensor, residual: Tensor) -> Tensor:
        """A linear layer, some of it dropped, the residual added, normalized."""

    def inner(self, dense: str, inputs: Tensor) -> Tensor:
        """A linear layer and GELU."""

    def pooled(self, dense: str, inputs: Tensor) -> Tensor:
        """A linear layer and tanh."""


class Recorder(Protocol):
    """Notes what values were used for and the gradient of what came out, which every hook returns."""

    def linear(self, names: tuple[str, ...], inputs: Tensor, output: Tensor) -> Tensor:
        """The outputs of these layers, side by side."""

    def norm(self, name: str, normed: Callable[[], Tensor], output: Tensor) -> Tensor:
        """A layer norm's output; `normed` gives it without its weight and bias."""

    def tables(self, output: Tensor) -> Tensor:
        """The sum of every token's rows of the tables."""


def stacked_vectors(
    ops: Ops, layout: BertLayout, batch: StackedBatch, pool: str, words: Tensor, places: Tensor | None = None
) -> Tensor:
    """One vector per sequence, (clients, sequences, width); `words` are the embeddings of every token.

    With `words` for pool, it is one for each of a client's tokens at (clients, places).
    """
    hidden = ops.embed(words)
    num_full = layout.num_layers if pool in EVERYWHERE else layout.num_layers - 1
    for number in range(num_full):
        mixed = ops.attend(f"encoder.layer.{number}.attention.self", hidden)
        hidden = _feed_forward(ops, number, hidden, mixed)
    if pool == "mean":
        return _means(hidden, batch)
    if pool == WORDS:
        assert places is not None, "a batch of tasks on words says where they are"
        return hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    number = layout.num_layers - 1
    first = ops.firsts(hidden)
    mixed = ops.attend_firsts(f"encoder.layer.{number}.attention.self", first, hidden)
    first = _feed_forward(ops, number, first, mixed)
    return ops.pooled("pooler.dense", first) if pool == "pooler" else first


def _feed_forward(ops: Ops, number: int, hidden: Tensor, mixed: Tensor) -> Tensor:
    name = f"encoder.layer.{number}"
    attention, output = f"{name}.attention.output", f"{name}.output"
    hidden = ops.norm_sum(f"{attention}.dense", f"{attention}.LayerNorm", mixed, hidden)
    inner = ops.inner(f"{name}.intermediate.dense", hidden)
    return ops.norm_sum(f"{output}.dense", f"{output}.LayerNorm", inner, hidden)


def _means(hidden: Tensor, batch: StackedBatch) -> Tensor:
    sequences = torch.arange(batch.starts.shape[1], device=hidden.device)
    belongs = (batch.owners[:, None] == sequences[:, None]).to(hidden.dtype)
    return torch.bmm(belongs, hidden) / batch.lengths[..., None].to(hidden.dtype)


def chosen_rows(batch: StackedBatch, num_positions: int, num_segments: int, dtype: torch.dtype) -> Tensor:
    """(clients, tokens, positions + segments): ones where a token's position and segment are.

    Rows of small tables are picked by a product: its gradient is one too, with a fixed order of sums.
    """
    columns = torch.arange(num_positions + num_segments, device=batch.ids.device)
    chosen = columns == batch.positions[..., None]
    chosen |= columns == (batch.segments.long() + num_positions)[..., None]
    return chosen.to(dtype)


class PlainOps:
    """Dropout draws from torch's generator."""

    def __init__(
        self, leaves: Leaves, layout: BertLayout, batch: StackedBatch, recorder: Recorder | None = None
    ) -> None:
        self._leaves, self._layout, self._batch, self._recorder = leaves, layout, batch, recorder

    def embed(self, words: Tensor) -> Tensor:
        positions, segments = (self._leaves((name,)).value for name in (POSITIONS, SEGMENTS))
        used = positions[:, : self._batch.width]
        chosen = chosen_rows(self._batch, used.shape[1], segments.shape[1], words.dtype)
        summed = torch.baddbmm(words, chosen, torch.cat([used, segments], 1))
        summed = summed if self._recorder is None else self._recorder.tables(summed)
        return self._dropped(self._norm("embeddings.LayerNorm", summed))

    def attend(self, layer: str, hidden: Tensor) -> Tensor:
        joined = self._linear(hidden, *(f"{layer}.{part}" for part in ("query", "key", "value")))
        query, key, value = (self._padded(part) for part in joined.chunk(3, -1))
        mixed = self._attend(query, key, value).transpose(1, 2).flatten(0, 1).flatten(1)
        return mixed.index_select(0, self._padded_index).view(*hidden.shape[:2], -1)

    def firsts(self, hidden: Tensor) -> Tensor:
        first = self._batch.global_starts().view(-1)
        return hidden.flatten(0, 1).index_select(0, first).view(len(hidden), -1, hidden.shape[-1])

    def attend_firsts(self, layer: str, first: Tensor, hidden: Tensor) -> Tensor:
        shape = (-1, 1, self._layout.num_heads, self._layout.head_size)
        query = self._linear(first, f"{layer}.query").reshape(shape).transpose(1, 2)
        joined = self._linear(hidden, f"{layer}.key", f"{layer}.value")
        key, value = (self._padded(part) for part in joined.chunk(2, -1))
        return self._attend(query, key, value).reshape(*first.shape[:2], -1)

    def norm_sum(self, dense: str, norm: str, inputs: Tensor, residual: Tensor) -> Tensor:
        return self._norm(norm, residual + self._dropped(self._linear(inputs, dense)))

    def inner(self, dense: str, inputs: Tensor) -> Tensor:
        return F.gelu(self._linear(inputs, dense))

    def pooled(self, dense: str, inputs: Tensor) -> Tensor:
        return torch.tanh(self._linear(inputs, dense))

    def _linear(self, inputs: Tensor, *names: str) -> Tensor:
        """One product for all these layers, their outputs side by side."""
        weight, bias = (self._leaves(tuple(f"{name}.{leaf}" for name in names)).value for leaf in ("weight", "bias"))
        output = torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))
        return output if self._recorder is None else self._recorder.linear(names, inputs, output)

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight, bias = (self._leaves((f"{name}.{leaf}",)).value.unsqueeze(1) for leaf in ("weight", "bias"))
        normed = F.layer_norm(inputs, (inputs.shape[-1],), eps=self._layout.epsilon)
        output = torch.addcmul(bias, normed, weight)
        return output if self._recorder is None else self._recorder.norm(name, normed.detach, output)

    def _dropped(self, values: Tensor) -> Tensor:
        return F.dropout(values, self._layout.hidden_dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(sequences, heads, width, size) of all three."""
        bias = self._bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, bias, self._layout.attention_dropout)

    def _padded(self, tokens: Tensor) -> Tensor:
        """(clients, tokens, heads * size) -> (sequences, heads, width, size)."""
        picked = tokens.flatten(0, 1).index_select(0, self._sources)
        return picked.view(-1, self._batch.width, self._layout.num_heads, self._layout.head_size).transpose(1, 2)

    @cached_property
    def _real(self) -> Tensor:
        columns = torch.arange(self._batch.width, device=self._batch.ids.device)
        return columns < self._batch.lengths[..., None]

    @cached_property
    def _sources(self) -> Tensor:
        """Which token fills each padded one; padding is filled with a sequence's first."""
        columns = torch.arange(self._batch.width, device=self._batch.ids.device)
        return (self._batch.global_starts()[..., None] + columns * self._real).view(-1)

    @cached_property
    def _padded_index(self) -> Tensor:
        """Where each token went among the padded ones; those after the last sequence are given its first."""
        batch = self._batch
        count = batch.starts.shape[1]
        rows = batch.owners.clamp(max=count - 1)
        rows = rows + torch.arange(len(rows), device=rows.device)[:, None] * count
        return (rows * batch.width + batch.positions * (batch.owners < count)).view(-1)

    @cached_property
    def _bias(self) -> Tensor:
        bias = torch.zeros(self._real.shape, device=self._real.device).masked_fill_(~self._real, -torch.inf)
        return bias.view(-1, 1, 1, self._batch.width)
