"""Keyed tensors in safetensors files, written whole or not at all.

They are written here and not by safetensors, which copies every tensor twice: a server writes its model after every
round while its clients wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedmtl.model.keys import Key, Weights
from fedmtl.runs import write_atomic

SEPARATOR = "|"
DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGN = 8


def save_tensors(path: Path, slots: Mapping[str, Mapping[Key, Tensor]]) -> str:
    """Write slot -> key -> tensor, and return the file's sha256; it appears under its name only when it is complete."""
    tensors = {
        SEPARATOR.join((slot, key.scope, key.name)): value.detach().cpu().contiguous()
        for slot, values in slots.items()
        for key, value in values.items()
    }
    # The widest values first, so that all of them lie where a reader can use them in place.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    parts: list[bytes | memoryview] = [_header({name: tensors[name] for name in names})]
    parts += [_bytes(tensors[name]) for name in names]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    write_atomic(path, *parts)
    return digest.hexdigest()


def load_tensors(path: Path) -> dict[str, Weights]:
    slots: dict[str, Weights] = {}
    for text, tensor in load_file(path).items():
        slot, scope, name = text.split(SEPARATOR, 2)
        slots.setdefault(slot, {})[Key(scope, name)] = tensor
    return slots


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    table = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
