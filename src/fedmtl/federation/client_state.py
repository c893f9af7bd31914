"""What stays at a client between rounds: its own values, its optimizer's state, and fixed values by digest.

States are kept per round, the last two of them: a client that is one round ahead of a resumed server
steps back to the round the server names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedmtl.model.keys import Key, Weights, weights_sha256
from fedmtl.model.tensor_files import load_tensors, save_tensors


def fixed_digest(key: Key, value: Tensor) -> str:
    return weights_sha256({key: value})[:16]


def load_state(folder: Path, state_round: int) -> dict[str, Weights]:
    """The slots saved for that round, or none where the client starts anew (round 0)."""
    if state_round == 0:
        return {}
    path = _state_path(folder, state_round)
    return load_tensors(path) if path.exists() else {}


def save_state(folder: Path, round_number: int, slots: Mapping[str, Mapping[Key, Tensor]], before: int) -> None:
    """Save this round's slots; keep those of `before`, the last round the server accepted, and drop older ones."""
    if not any(slots.values()):
        return
    save_tensors(_state_path(folder, round_number), slots)
    for path in folder.glob("round-*.safetensors"):
        if _round_of(path) not in (round_number, before):
            path.unlink(missing_ok=True)


def remember_fixed(folder: Path, weights: Weights, digests: Mapping[str, str]) -> Weights:
    """All fixed values of a job: those it brought are stored by digest, the others read from the store.

    Raises KeyError with the name of a value that was neither sent nor stored.
    """
    values: Weights = {}
    for name, digest in digests.items():
        key = Key("fixed", name)
        path = folder / f"{digest}.safetensors"
        if key in weights:
            values[key] = weights[key]
            if not path.exists():
                save_tensors(path, {"fixed": {key: weights[key]}})
        elif path.exists():
            values[key] = load_tensors(path)["fixed"][key]
        else:
            raise KeyError(name)
    return values


def _state_path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:04d}.safetensors"


def _round_of(path: Path) -> int:
    match = re.search(r"round-(\d+)", path.name)
    return int(match[1]) if match else -1
