"""BERT for several clients at once: `fast_bert`'s computation with a client axis in front of every value.

The products of all clients become one batched product, which is what a GPU needs to be busy with small encoders.
Tokens are packed: each client has a fixed number of places, its sequences end to end in the first of them. What is
computed at the places after them is never looked at.

The computation is written once, here; its parts come from `stacked_plain` or, on a GPU, from `stacked_fused`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedmtl.model.bert_layout import BertLayout

POSITIONS, SEGMENTS = (f"embeddings.{kind}_embeddings.weight" for kind in ("position", "token_type"))


@dataclass(frozen=True)
class StackedBatch:
    """One batch of every client: (clients, places) of tokens, (clients, sequences) of where they are.

    `owners` says which sequence a place belongs to; places after the last sequence belong to one past it. No sequence
    is longer than `width`.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    owners: Tensor
    starts: Tensor
    lengths: Tensor
    width: int

    def global_starts(self) -> Tensor:
        """Where sequences begin in all clients' places end to end."""
        clients = torch.arange(len(self.starts), device=self.starts.device)
        return self.starts + clients[:, None] * self.ids.shape[1]


@dataclass(frozen=True)
class Leaf:
    """(clients, *shape) of some values, and where their gradients are kept; None where they take none."""

    value: Tensor
    gradient: Tensor | None


# Names of values that lie side by side -> one leaf for all of them.
Leaves = Callable[[tuple[str, ...]], Leaf]


class Ops(Protocol):
    """The parts of the computation; hidden states are (clients, places or sequences, width)."""

    def embed(self, words: Tensor) -> Tensor:
        """Words plus positions plus segments, normalized, then some dropped."""

    def attend(self, layer: str, hidden: Tensor) -> Tensor:
        """Attention within each sequence, at every place."""

    def firsts(self, hidden: Tensor) -> Tensor:
        """The hidden states of every sequence's first place."""

    def attend_firsts(self, layer: str, first: Tensor, hidden: Tensor) -> Tensor:
        """Attention within each sequence, at its first place."""

    def norm_sum(self, dense: str, norm: str, inputs: Tensor, residual: Tensor) -> Tensor:
        """A linear layer, some of it dropped, the residual added, normalized."""

    def inner(self, dense: str, inputs: Tensor) -> Tensor:
        """A linear layer and GELU."""

    def pooled(self, dense: str, inputs: Tensor) -> Tensor:
        """A linear layer and tanh."""


def stacked_vectors(ops: Ops, layout: BertLayout, batch: StackedBatch, pool: str, words: Tensor) -> Tensor:
    """One vector per sequence, (clients, sequences, width); `words` are the token embeddings of every place."""
    hidden = ops.embed(words)
    num_full = layout.num_layers if pool == "mean" else layout.num_layers - 1
    for number in range(num_full):
        mixed = ops.attend(f"encoder.layer.{number}.attention.self", hidden)
        hidden = _feed_forward(ops, number, hidden, mixed)
    if pool == "mean":
        return _means(hidden, batch)
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
    """(clients, places, positions + segments): ones where a place's position and segment are.

    Rows of small tables are picked by a product: its gradient is one too, with a fixed order of sums.
    """
    columns = torch.arange(num_positions + num_segments, device=batch.ids.device)
    chosen = columns == batch.positions[..., None]
    chosen |= columns == (batch.segments.long() + num_positions)[..., None]
    return chosen.to(dtype)
