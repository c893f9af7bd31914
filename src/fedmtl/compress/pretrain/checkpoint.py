"""Everything a pretraining needs to go on, in one file that is written whole or not at all."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedmtl.compress.pretrain.student import Student
from fedmtl.errors import FedmtlError
from fedmtl.runs import write_atomic


@dataclass
class Position:
    """How far a pretraining is: steps and seconds of training, segments seen, and the log so far."""

    step: int = 0
    seconds: float = 0.0
    num_segments: int = 0
    num_tokens: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def save_checkpoint(
    path: Path, fingerprint: str, position: Position, student: Student, optimizer: torch.optim.Optimizer
) -> None:
    data = io.BytesIO()
    content = {
        "fingerprint": fingerprint,
        "position": vars(position),
        "student": student.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, data)
    write_atomic(path, data.getvalue())


def load_checkpoint(path: Path, fingerprint: str, student: Student, optimizer: torch.optim.Optimizer) -> Position:
    """Put the values back in place; other settings than the checkpoint's are an error."""
    device = next(student.parameters()).device
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise FedmtlError(f"{path}: cannot be read as a checkpoint; delete it and start without --resume") from error
    if not isinstance(content, dict) or content.get("fingerprint") != fingerprint:
        raise FedmtlError(
            f"{path}: was made with other settings or texts; give the same, or delete it and start without --resume"
        )
    try:
        position = Position(**content["position"])
        student.load_state_dict(content["student"])
        optimizer.load_state_dict(content["optimizer"])
    except Exception as error:  # torch's kinds for what does not fit, and Python's for what is not there
        raise FedmtlError(f"{path}: does not fit its settings; delete it and start without --resume") from error
    return position
