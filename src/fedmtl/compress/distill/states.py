"""What goes on inside an encoder while it reads a batch: hidden states, and queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedmtl.compress.pretrain.attention import projections
from fedmtl.model.multitask import Inputs, MultiTaskModel


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values [batch, position, width] of one layer."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def scores(self, num_heads: int) -> Tensor:
        """The raw scores [batch, head, position, position]: before the softmax, and without a mask or a bias."""
        queries, keys = (_split(part, num_heads) for part in (self.queries, self.keys))
        scaled: Tensor = queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5
        return scaled


@dataclass(frozen=True)
class States:
    """All hidden states, embeddings first, and the attention of the layers that are watched."""

    hidden: tuple[Tensor, ...]
    attention: tuple[Attention, ...]


class Watched:
    """A model whose inner states can be asked for; `close` takes the hooks off again."""

    def __init__(self, model: MultiTaskModel, layers: Sequence[int]) -> None:
        self.model, self.layers = model, tuple(layers)
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._hooks = [
            module.register_forward_hook(self._keeper((layer, position)))
            for layer in dict.fromkeys(layers)
            for position, module in enumerate(projections(model.encoder, layer))
        ]

    def states(self, task: str, inputs: Inputs) -> States:
        """The states for a batch; the model has the task's values in place."""
        model = self.model
        offered = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "token_type_ids": inputs.segments}
        adapted = nullcontext() if model.adapters is None else model.adapters.used_by(task, inputs.mask)
        with adapted:
            output = model.encoder(**{name: offered[name] for name in model.accepts}, output_hidden_states=True)
        seen, self._seen = self._seen, {}
        return States(
            tuple(output.hidden_states),
            tuple(Attention(*(seen[layer, position] for position in range(3))) for layer in self.layers),
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, place: tuple[int, int]) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._seen[place] = output

        return keep


def _split(states: Tensor, num_heads: int) -> Tensor:
    batch, length, width = states.shape
    return states.float().reshape(batch, length, num_heads, width // num_heads).transpose(1, 2)
