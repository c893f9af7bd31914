"""Which attention heads of a BERT matter least, and what is left in a layer without them.

A head reads a mean of the hidden states through W_v and writes it through W_o; queries and keys only say which mean.
So heads go by |W_o W_v|, the Frobenius norm of the whole map (the OV circuit of Elhage et al. 2021, A Mathematical
Framework for Transformer Circuits), as many in every layer. Like magnitude pruning this needs no text, which a server
does not have; with text, the gradients of Michel et al. 2019, Are Sixteen Heads Really Better than One?, say more.

The shares of a mean add up to 1, so the value's bias comes out as the constant W_o b_v. A head that goes leaves it in
the bias of the output: with |W_o W_v| = 0, answers stay what they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmtl.model.keys import Key
from fedmtl.model.saved import SavedModel

VALUE, OUT = "attention.self.value", "attention.output.dense"
# What a head is made of: the part of a layer's values, and their dimension that counts the heads' columns.
HEAD = {
    **{f"attention.self.{part}.{leaf}": 0 for part in ("query", "key", "value") for leaf in ("weight", "bias")},
    f"{OUT}.weight": 1,
}


def kept_columns(saved: SavedModel, layer: int, count: int) -> Tensor:
    """The columns of the heads that matter most, in order; tasks that have a layer of their own count together."""
    assert saved.model.layout is not None
    num_heads, size = saved.model.layout.num_heads, saved.model.layout.head_size
    total = torch.zeros(num_heads, dtype=torch.float64)
    for task in saved.tasks:
        value, out = (_value(saved, layer, f"{part}.weight", task).double() for part in (VALUE, OUT))
        maps = out.view(len(out), num_heads, size).transpose(0, 1) @ value.view(num_heads, size, -1)
        total += torch.linalg.matrix_norm(maps)
    heads = torch.argsort(total, descending=True, stable=True)[:count].sort().values
    return (heads[:, None] * size + torch.arange(size)).view(-1)


def constants(saved: SavedModel, layer: int, kept: Tensor) -> dict[Key, Tensor]:
    """What heads that go leave in the output's bias, by its key: for tasks that share it, the mean of theirs."""
    assert saved.model.layout is not None
    if len(kept) == saved.model.layout.attention_width:
        return {}
    found: dict[Key, list[Tensor]] = {}
    for task in saved.tasks:
        out, bias = _value(saved, layer, f"{OUT}.weight", task), _value(saved, layer, f"{VALUE}.bias", task)
        gone = torch.ones(len(bias), dtype=torch.bool)
        gone[kept] = False
        own = out[:, gone].double() @ bias[gone].double()
        found.setdefault(saved.plan.key(f"encoder.layer.{layer}.{OUT}.bias", task, ""), []).append(own)
    return {key: torch.stack(parts).mean(0) for key, parts in found.items()}


def _value(saved: SavedModel, layer: int, part: str, task: str) -> Tensor:
    return saved.weights[saved.plan.key(f"encoder.layer.{layer}.{part}", task, "")]
