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

from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt, parse_json
from fedmtl.runs.folder import write_atomic
from fedmtl.sharing.plan import Key, Weights

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
# A thousand values a megabyte; the models with most values have some ten thousand.
LARGEST_HEADER = 64 << 20
REMEDY = "put back a whole copy of the file"


def save_tensors(path: Path, slots: Mapping[str, Mapping[Key, Tensor]]) -> str:
    """Write slot -> key -> tensor, and return the file's sha256; it appears under its name only when it is complete."""
    tensors = {
        SEPARATOR.join((slot, key.scope, key.name)): value.detach().cpu().contiguous()
        for slot, values in slots.items()
        for key, value in values.items()
    }
    # The widest values first, so that all of them are aligned and a reader can use them without a copy.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    parts: list[bytes | memoryview] = [_header({name: tensors[name] for name in names})]
    parts += [_bytes(tensors[name]) for name in names]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    write_atomic(path, *parts)
    return digest.hexdigest()


def load_tensors(path: Path) -> dict[str, Weights]:
    """Read slot -> key -> tensor as `save_tensors` wrote them; any other file is a FedmtlError."""
    slots: dict[str, Weights] = {}
    for text, tensor in load_safetensors(path).items():
        parts = text.split(SEPARATOR, 2)
        if len(parts) != 3 or tensor.dtype not in DTYPES:
            raise FedmtlError(f"{path}: holds {excerpt(repr(text))}, which is not one of our values; {REMEDY}")
        slots.setdefault(parts[0], {})[Key(parts[1], parts[2])] = tensor
    return slots


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of any safetensors file; the header is checked before the library and torch see it."""
    try:
        _check_header(path)
        return dict(load_file(path))
    except FedmtlError:
        raise
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror or excerpt(error)}); {REMEDY}") from None
    except Exception as error:  # safetensors', torch's, and Python's for a type that it does not know
        raise FedmtlError(f"{path}: is not a whole tensor file ({excerpt(error)}); {REMEDY}") from None


def _check_header(path: Path) -> None:
    """Raise unless every tensor has a shape that its bytes fill and that torch can address."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise FedmtlError(f"{path}: is not a whole tensor file (its header is too long); {REMEDY}")
        header = parse_json(file.read(length), f"{path}, header", REMEDY)
    if not isinstance(header, dict):
        raise FedmtlError(f"{path}: is not a whole tensor file (it has no table of tensors); {REMEDY}")
    for name, about in header.items():
        if name == "__metadata__":
            continue
        shape = about.get("shape") if isinstance(about, dict) else None
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
            raise FedmtlError(f"{path}: is not a whole tensor file (a tensor has no shape); {REMEDY}")


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
