"""Queries, keys and values of one attention layer, for relations between words.

Attention probabilities cannot be compared where the vocabularies differ: they are over tokens, and an average of
softmaxes over a word's pieces is no softmax over words. Queries, keys and values can: their mean over a word's
pieces is the query, key or value of the word's mean state, as they are linear in it. MiniLMv2's relations
of those means are over the same words on both sides, whatever the numbers of heads and the widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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


class LayerCall:
    """One layer's call of a module that several layers share, as ALBERT's do; it is hooked as a module is."""

    def __init__(self, model: nn.Module, module: nn.Module, number: int) -> None:
        self._model, self._module, self._number = model, module, number

    def register_forward_hook(self, hook: Callable[[nn.Module, Any, Tensor], None]) -> LayerCallHandle:
        """Have the hook called by this layer's call in every pass of the model; `remove` ends that."""
        calls = 0

        def begin(model: nn.Module, inputs: Any) -> None:
            nonlocal calls
            calls = 0

        def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal calls
            if calls == self._number:
                hook(module, inputs, output)
            calls += 1

        return LayerCallHandle(self._model.register_forward_pre_hook(begin), self._module.register_forward_hook(count))


@dataclass(frozen=True)
class LayerCallHandle:
    """The two hooks of a layer's call."""

    begin: RemovableHandle
    count: RemovableHandle

    def remove(self) -> None:
        self.begin.remove()
        self.count.remove()


def projections(model: Any, layer: int) -> list[Any]:
    """What gives one layer's queries, keys and values: modules, or the layer's calls of those that layers share."""
    config = model.config
    num_layers, num_groups = config.num_hidden_layers, getattr(config, "num_hidden_groups", None)
    for names in NAMES:
        found = [[part for path, part in model.named_modules() if path.split(".")[-1] == name] for name in names]
        if all(len(parts) == num_layers for parts in found) and num_groups is None:
            return [parts[layer] for parts in found]
        if num_groups and all(len(parts) == num_groups for parts in found):
            # As in transformers' AlbertTransformer.
            groups = [int(number / (num_layers / num_groups)) for number in range(num_layers)]
            group = groups[layer]
            return [LayerCall(model, parts[group], groups[: layer % num_layers].count(group)) for parts in found]
    raise ModelError(
        f"attention loss: {config.model_type} has no separate queries, keys and values in its layers; write"
        " `distill --weights attention=0`, or `pretrain --no-attention-loss`"
    )
