"""The embeddings of a batch's tokens, forward and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.cpu.encoder_pass import Normed, Pass

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
    table = run.values[TABLE.format(kind)]
    return torch.index_select(table, 0, index, out=run.take(buffer, len(index), table.shape[1]))
