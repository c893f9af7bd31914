"""All trainable values of a slice end to end in one buffer, each parameter a view of its part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedmtl.model.keys import HEADS, Key, Weights
from fedmtl.model.multitask import MultiTaskModel


@dataclass
class Buffers:
    """Memory that is kept from one client to the next; a buffer of a name is only valid until it is taken again."""

    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of that size, with anything in it."""
        known = self.kept.get(name)
        if known is None or known.numel() < size or known.dtype != dtype or known.device != device:
            # Clients differ a little in size: some room spares the next one a new buffer.
            known = self.kept[name] = torch.empty(size + size // 8, dtype=dtype, device=device)
        return known[:size]


@dataclass(frozen=True)
class Flat:
    """The buffer, and which part of it belongs to which key, in order."""

    values: Tensor
    places: Mapping[Key, slice]


def flatten(weights: Weights, order: Sequence[Key], buffers: Buffers, device: torch.device | None) -> Flat:
    """Copy these keys' values into a buffer, in that order."""
    places: dict[Key, slice] = {}
    total = 0
    for key in order:
        places[key] = slice(total, total + weights[key].numel())
        total += weights[key].numel()
    dtypes = {weights[key].dtype for key in order} or {torch.get_default_dtype()}
    assert len(dtypes) == 1, "the trainable values of a model have one dtype"
    target = torch.device("cpu") if device is None else device
    values = buffers.take("values", total, dtypes.pop(), target)
    for key, place in places.items():
        values[place].copy_(weights[key].detach().reshape(-1))
    return Flat(values, places)


def is_decayed(module: nn.Module, parameter: Tensor) -> bool:
    """Whether weight decay is for this parameter of a module; tables, norms and biases are left alone."""
    return parameter.dim() >= 2 and not isinstance(module, nn.Embedding)


def undecayed(model: MultiTaskModel) -> set[str]:
    """Names of parameters that weight decay leaves alone."""
    return {name for name, (module, leaf) in model.canonical().items() if not is_decayed(module, getattr(module, leaf))}


def flat_order(views: Mapping[str, Mapping[str, Key]], keys: Iterable[Key], plain: set[str]) -> list[Key]:
    """The keys so that those with one decay, one rate and the same tasks are neighbours, and step in one call."""
    users: dict[Key, tuple[str, ...]] = {}
    for task, view in views.items():
        for key in view.values():
            users[key] = (*users.get(key, ()), task)
    return sorted(keys, key=lambda key: (key.name in plain, key.name.startswith(HEADS), users[key]))
