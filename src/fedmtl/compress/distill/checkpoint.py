"""How far a distillation is, in one file that is written whole or not at all, after every pass."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.compress.distill.loop import Slots
from fedmtl.errors import FedmtlError
from fedmtl.model.keys import Key, Weights
from fedmtl.model.tensor_files import SEPARATOR
from fedmtl.runs import RunFolder, write_atomic


@dataclass(frozen=True)
class Position:
    """After `epoch` passes of `stage`: all values, and the optimizer's state for the next pass."""

    stage: str = ""
    epoch: int = 0
    weights: Weights = field(default_factory=dict)
    optimizer: Slots = field(default_factory=dict)


def checkpoint_path(run: RunFolder) -> Path:
    return run.checkpoints / "distill.pt"


def save_position(run: RunFolder, fingerprint: str, position: Position) -> None:
    data = io.BytesIO()
    weights = {SEPARATOR.join(key): value for key, value in position.weights.items()}
    content = {**vars(position), "weights": weights, "fingerprint": fingerprint}
    torch.save(content, data)
    write_atomic(checkpoint_path(run), data.getvalue())


def load_position(run: RunFolder, fingerprint: str) -> Position:
    """The last one that was saved; other settings than its own are an error, a run without one begins anew."""
    path = checkpoint_path(run)
    if not path.exists():
        return Position()
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = content.pop("fingerprint")
        weights = {Key(*name.split(SEPARATOR, 1)): value for name, value in content.pop("weights").items()}
        position = Position(**content, weights=weights)
        is_ours = isinstance(position.stage, str) and type(position.epoch) is int and position.epoch >= 0
        is_ours &= all(isinstance(value, Tensor) for value in weights.values()) and type(position.optimizer) is dict
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise FedmtlError(
            f"{path}: cannot be read as a checkpoint; delete the run and start without --resume"
        ) from error
    if not is_ours:
        raise FedmtlError(f"{path}: cannot be read as a checkpoint; delete the run and start without --resume")
    if found != fingerprint:
        raise FedmtlError(
            f"{run.name}: was begun with another teacher or other settings; give the same, or another --name"
        )
    return position
