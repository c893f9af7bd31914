"""The parts of a stacked BERT from torch's own operations: any device, any dtype."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl.model.bert_layout import BertLayout
from fedmtl.model.stacked_bert import POSITIONS, SEGMENTS, Leaves, StackedBatch, chosen_rows


class PlainOps:
    """Dropout draws from torch's generator."""

    def __init__(self, leaves: Leaves, layout: BertLayout, batch: StackedBatch) -> None:
        self._leaves, self._layout, self._batch = leaves, layout, batch

    def embed(self, words: Tensor) -> Tensor:
        positions, segments = (self._leaves((name,)).value for name in (POSITIONS, SEGMENTS))
        used = positions[:, : self._batch.width]
        chosen = chosen_rows(self._batch, used.shape[1], segments.shape[1], words.dtype)
        summed = torch.baddbmm(words, chosen, torch.cat([used, segments], 1))
        return self._dropped(self._norm("embeddings.LayerNorm", summed))

    def attend(self, layer: str, hidden: Tensor) -> Tensor:
        joined = self._linear(hidden, *(f"{layer}.{part}" for part in ("query", "key", "value")))
        query, key, value = (self._padded(part) for part in joined.chunk(3, -1))
        mixed = self._attend(query, key, value).transpose(1, 2).flatten(0, 1).flatten(1)
        return mixed.index_select(0, self._places).view(*hidden.shape[:2], -1)

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
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight, bias = (self._leaves((f"{name}.{leaf}",)).value.unsqueeze(1) for leaf in ("weight", "bias"))
        return torch.addcmul(bias, F.layer_norm(inputs, (inputs.shape[-1],), eps=self._layout.epsilon), weight)

    def _dropped(self, values: Tensor) -> Tensor:
        return F.dropout(values, self._layout.hidden_dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(sequences, heads, width, size) of all three."""
        bias = self._bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, bias, self._layout.attention_dropout)

    def _padded(self, tokens: Tensor) -> Tensor:
        """(clients, places, heads * size) -> (sequences, heads, width, size)."""
        picked = tokens.flatten(0, 1).index_select(0, self._sources)
        return picked.view(-1, self._batch.width, self._layout.num_heads, self._layout.head_size).transpose(1, 2)

    @cached_property
    def _real(self) -> Tensor:
        columns = torch.arange(self._batch.width, device=self._batch.ids.device)
        return columns < self._batch.lengths[..., None]

    @cached_property
    def _sources(self) -> Tensor:
        """Which place fills each of the padded ones; padding is filled with a sequence's first."""
        columns = torch.arange(self._batch.width, device=self._batch.ids.device)
        return (self._batch.global_starts()[..., None] + columns * self._real).view(-1)

    @cached_property
    def _places(self) -> Tensor:
        """Where each place went among the padded ones; those after the last sequence are given its first."""
        batch = self._batch
        count = batch.starts.shape[1]
        rows = batch.owners.clamp(max=count - 1)
        rows = rows + torch.arange(len(rows), device=rows.device)[:, None] * count
        return (rows * batch.width + batch.positions * (batch.owners < count)).view(-1)

    @cached_property
    def _bias(self) -> Tensor:
        bias = torch.zeros(self._real.shape, device=self._real.device).masked_fill_(~self._real, -torch.inf)
        return bias.view(-1, 1, 1, self._batch.width)
