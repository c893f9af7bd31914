"""Keyed tensors in safetensors files, written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from fedmtl.model.keys import Key, Weights
from fedmtl.runs import write_atomic

SEPARATOR = "|"


def save_tensors(path: Path, slots: Mapping[str, Mapping[Key, Tensor]]) -> None:
    """Write slot -> key -> tensor; the file appears under its name only when it is complete."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for slot, values in slots.items():
        for key, value in values.items():
            tensor = value.detach().cpu().contiguous()
            # safetensors refuses two names for one memory: a best head may be the current one.
            if tensor.untyped_storage().data_ptr() in memory:
                tensor = tensor.clone()
            memory.add(tensor.untyped_storage().data_ptr())
            tensors[SEPARATOR.join((slot, key.scope, key.name))] = tensor
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors))


def load_tensors(path: Path) -> dict[str, Weights]:
    slots: dict[str, Weights] = {}
    for text, tensor in load_file(path).items():
        slot, scope, name = text.split(SEPARATOR, 2)
        slots.setdefault(slot, {})[Key(scope, name)] = tensor
    return slots
