"""The intermediate stage of task distillation: TinyBERT (Jiao et al. 2020), equations 7 to 9.

It compares what goes on inside teacher and student while they read a batch: hidden states, and queries, keys and
values. The losses of all layers are added up, as in the paper. Where we differ: padding is in no mean; where the
student has another number of heads its scores cannot be compared one by one, and relations between positions (MiniLMv2,
Wang et al. 2021) are compared instead. Heads and pooler get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.compress.attention import projections, relation_heads
from fedmtl.compress.distill.settings import DEFAULT_MAP, DistillSettings
from fedmtl.errors import ConfigError
from fedmtl.model.bert.layout import attention_width, num_heads
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.seeds import derive_seed
from fedmtl.training.distillation import attention_loss, hidden_loss, relation_loss
from fedmtl.training.layer_maps import LayerMap, attention_map, hidden_map


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
    """An encoder whose attention can be read after each pass; `close` takes the hooks off again."""

    def __init__(self, encoder: Any, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._hooks = [
            module.register_forward_hook(self._keeper((layer, position)))
            for layer in dict.fromkeys(layers)
            for position, module in enumerate(projections(encoder, layer))
        ]

    def states(self, hidden: Sequence[Tensor]) -> States:
        """The states of the pass that gave these hidden states; its attention is then forgotten."""
        seen, self._seen = self._seen, {}
        return States(
            tuple(hidden),
            tuple(Attention(*(seen[layer, position] for position in range(3))) for layer in self.layers),
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, slot: tuple[int, int]) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._seen[slot] = output

        return keep


def _split(states: Tensor, num_heads: int) -> Tensor:
    batch, length, width = states.shape
    return states.float().reshape(batch, length, num_heads, width // num_heads).transpose(1, 2)


class Projections(nn.Module):
    """From the student's width into the teacher's: W_e for embeddings, W_h for all layers, or one for both.

    With equal widths there is nothing to learn, and states are compared as they are.
    """

    def __init__(self, student_width: int, teacher_width: int, kind: str, seed: int) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Identity()
        self.hidden: nn.Module = nn.Identity()
        if student_width != teacher_width:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "projections"))
                self.hidden = nn.Linear(student_width, teacher_width, bias=False)
                self.embedding = self.hidden if kind == "one" else nn.Linear(student_width, teacher_width, bias=False)

    def take_over(self, values: Mapping[str, Tensor]) -> None:
        """Go on with the projections of a general distillation; with one for both, that of the hidden states."""
        present = self.state_dict()
        for name in ("embedding.weight", "hidden.weight"):
            if name not in values or name not in present:
                continue
            found, needed = tuple(values[name].shape), tuple(present[name].shape)
            if found != needed:
                raise ConfigError(
                    f"--student: its projection {name} is {found}, and {needed} is needed; pretrain again"
                )
            present[name].copy_(values[name])

    def forward(self, hidden: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Every state in the teacher's width, embeddings first."""
        yield self.embedding(hidden[0])
        yield from map(self.hidden, hidden[1:])


class StateLosses:
    """The losses between the states of a teacher and of a student that read the same tokens.

    Both stages of TinyBERT have them: general distillation on any text, and the intermediate stage on a task's.
    """

    def __init__(self, teacher: Any, student: Any, settings: DistillSettings, seed: int) -> None:
        above, below = teacher.config, student.config
        layers = int(above.num_hidden_layers), int(below.num_hidden_layers)
        self.weights, layer_map = settings.weights, settings.layer_map or DEFAULT_MAP
        self.hidden = hidden_map(*layers, layer_map)
        wanted = attention_layers(*layers, layer_map) if self.weights.attention else ()
        self.num_heads = num_heads(above)
        self.uses_scores = compares_scores(settings, self.num_heads, num_heads(below))
        self.relation_heads = relation_heads(attention_width(above), attention_width(below), self.num_heads)
        self.projections = Projections(below.hidden_size, above.hidden_size, settings.projections, seed)
        self.above, self.below = Watched(teacher, wanted), Watched(student, range(len(wanted)))

    def compare(self, above: States, below: States, mask: Tensor) -> dict[str, Tensor]:
        """Each loss before its weight; those of weight 0 are left out."""
        found: dict[str, Tensor] = {}
        projected = self.projections(below.hidden)
        embedded = next(projected)
        if self.weights.embedding:
            found["embedding"] = hidden_loss(above.hidden[self.hidden[0]], embedded, mask)
        if self.weights.attention:
            found["attention"] = _total(
                self._attention(*pair, mask) for pair in zip(above.attention, below.attention, strict=True)
            )
        if self.weights.hidden:
            pairs = zip(self.hidden[1:], projected, strict=True)
            found["hidden"] = _total(hidden_loss(above.hidden[number], state, mask) for number, state in pairs)
        return found

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        return _total(getattr(self.weights, name) * loss for name, loss in losses.items())

    def close(self) -> None:
        self.above.close()
        self.below.close()

    def _attention(self, above: Attention, below: Attention, mask: Tensor) -> Tensor:
        if self.uses_scores:
            return attention_loss(above.scores(self.num_heads), below.scores(self.num_heads), mask)
        parts = ((above.queries, below.queries), (above.keys, below.keys), (above.values, below.values))
        return _total(relation_loss(*pair, mask, self.relation_heads) for pair in parts) / len(parts)


class Intermediate(StateLosses):
    """The losses of the intermediate stage: teacher and student are whole models, bound to a task's values."""

    def __init__(self, teacher: BoundModel, student: BoundModel, settings: DistillSettings, seed: int) -> None:
        self.teacher, self.student = teacher, student
        super().__init__(teacher.model.encoder, student.model.encoder, settings, seed)

    def losses(self, task: str, inputs: Inputs) -> dict[str, Tensor]:
        """Each loss before its weight; those of weight 0 are left out."""
        with torch.no_grad():
            above = self.above.states(_hidden_states(self.teacher, task, inputs))
        below = self.below.states(_hidden_states(self.student, task, inputs))
        return self.compare(above, below, inputs.mask.bool())


def _hidden_states(bound: BoundModel, task: str, inputs: Inputs) -> Sequence[Tensor]:
    bound.use(task)
    model = bound.model
    offered = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "token_type_ids": inputs.segments}
    adapted = nullcontext() if model.adapters is None else model.adapters.used_by(task, inputs.mask)
    with adapted:
        output = model.encoder(**{name: offered[name] for name in model.accepts}, output_hidden_states=True)
    states: Sequence[Tensor] = output.hidden_states
    return states


def compares_scores(settings: DistillSettings, teacher_heads: int, student_heads: int) -> bool:
    """Whether attention scores are compared; relations otherwise, where the settings leave that open."""
    if settings.attention == "scores" and teacher_heads != student_heads:
        raise ConfigError(
            f"--attention: scores need as many heads on both sides, the teacher has {teacher_heads} and the student "
            f"{student_heads}; write --attention relations, or --weights attention=0"
        )
    return settings.attention != "relations" and teacher_heads == student_heads


def attention_layers(num_teacher: int, num_student: int, layer_map: LayerMap) -> tuple[int, ...]:
    """The teacher's layer for each of the student's; a list names hidden states, embeddings first."""
    if isinstance(layer_map, str):
        return attention_map(num_teacher, num_student, layer_map)
    states = hidden_map(num_teacher, num_student, layer_map)
    if 0 in states[1:]:
        raise ConfigError(
            f"--layer-map {','.join(map(str, states))}: embeddings (0) have no attention; give every layer of the"
            " student one of the teacher's, from 1 on, or write --weights attention=0"
        )
    return tuple(state - 1 for state in states[1:])


def _total(parts: Iterator[Tensor]) -> Tensor:
    first, *others = parts
    for part in others:
        first = first + part
    return first
