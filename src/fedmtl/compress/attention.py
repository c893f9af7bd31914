"""Queries, keys and values of one attention layer, for relations between words.

Attention probabilities cannot be compared where the vocabularies differ: they are over tokens, and an average of
softmaxes over a word's pieces is no softmax over words. Queries, keys and values can: their mean over a word's
pieces is the query, key or value of the word's mean state, as they are linear in it. MiniLMv2's relations
of those means are over the same words on both sides, whatever the numbers of heads and the widths.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fedmtl.errors import ModelError

# How BERT and its kin, DistilBERT, and MPNet name the three.
NAMES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))


class AttentionTap:
    """Stores the last outputs of one layer's three projections."""

    def __init__(self, model: Any, layer: int) -> None:
        self.outputs: list[Tensor | None] = [None, None, None]
        for position, module in enumerate(projections(model, layer)):
            module.register_forward_hook(self._keeper(position))

    def take(self) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, token, width] of the last forward pass; they are then forgotten."""
        taken = tuple(tensor for tensor in self.outputs if tensor is not None)
        assert len(taken) == 3, "the layer was not run"
        self.outputs = [None, None, None]
        return taken

    def _keeper(self, position: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.outputs[position] = output

        return keep


def relation_heads(first_width: int, second_width: int, most: int) -> int:
    """The largest number of heads, up to `most`, that divides both widths."""
    common = math.gcd(first_width, second_width)
    return max(number for number in range(1, most + 1) if common % number == 0)


def projections(model: Any, layer: int) -> list[nn.Module]:
    """The modules that give one layer's queries, keys and values."""
    num_layers = model.config.num_hidden_layers
    for names in NAMES:
        found = [[part for path, part in model.named_modules() if path.split(".")[-1] == name] for name in names]
        if all(len(parts) == num_layers for parts in found):
            return [parts[layer] for parts in found]
    raise ModelError(
        f"attention loss: no queries, keys and values are found in each layer of {model.config.model_type}; "
        "leave that loss off"
    )
