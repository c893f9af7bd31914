"""The names of values: a parameter's canonical name together with the scope that shares it."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

import torch
from torch import Tensor

HEADS = "heads."
LOG_VARIANCE = ".log_variance"
ADAPTERS = "adapters."


class Key(NamedTuple):
    """The key of a value: the name of its parameter, and the scope of those who share it.

    `scope` is `all`, `group:<path>`, `task:<task>`, `client:<client>` or `fixed`.
    """

    scope: str
    name: str


Weights = dict[Key, Tensor]


def is_personal(key: Key) -> bool:
    """Whether the value stays at its client."""
    return key.scope.startswith("client:")


def owner_task(name: str) -> str | None:
    """The task that a parameter of a head or of adapters belongs to; None for the encoder's."""
    return name.split(".", 2)[1] if name.startswith((HEADS, ADAPTERS)) else None


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: `encoder.layer.3`, `embeddings`, `heads.sst2`, `adapters.sst2`."""
    if owner_task(name) is not None:
        return ".".join(name.split(".", 2)[:2])
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.split(".", 1)[0]


def weights_sha256(weights: Weights) -> str:
    """A digest of (scope, name, dtype, shape, little-endian bytes), sorted, without what stays at clients."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        if is_personal(key):
            continue
        tensor = weights[key].detach().cpu().contiguous()
        digest.update(f"{key.scope}\0{key.name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
