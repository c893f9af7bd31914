"""What joins TinyBERT's two stages: the record that general distillation leaves beside a student for its tasks.

`fedmtl pretrain --vocab teacher` writes it into the encoder's folder, and `fedmtl distill --student FOLDER` reads it:
the layer map goes on as it was, and so do the projections into the teacher's width, as in TinyBERT's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedmtl.errors import ModelError

RECORD = "general.json"
PROJECTIONS = "projections.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class General:
    """The teacher of a general distillation, and the hidden states of it that the student's were compared with."""

    teacher: str
    teacher_layers: int
    teacher_width: int
    hidden_map: tuple[int, ...]


def write_general(folder: Path, general: General, projections: Mapping[str, Tensor]) -> None:
    """Write the record, and the projections where the widths differ."""
    content = {"format": FORMAT, **asdict(general), "hidden_map": list(general.hidden_map)}
    (folder / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if projections:
        values = {name: value.detach().float().cpu().clone() for name, value in projections.items()}
        (folder / PROJECTIONS).write_bytes(save(values, metadata={"format": "pt"}))


def read_general(folder: Path) -> General | None:
    """Read the record of an encoder's folder; None for an encoder without one, and a ModelError for a damaged one."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ModelError(f"{path}: has format {content['format']!r}, this version reads {FORMAT}; pretrain again")
        layers, width = int(content["teacher_layers"]), int(content["teacher_width"])
        return General(str(content["teacher"]), layers, width, tuple(map(int, content["hidden_map"])))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: is no record of a general distillation; put back a copy, or delete it") from error


def read_projections(folder: Path) -> dict[str, Tensor]:
    """Read the projections beside the record; there are none where teacher and student are equally wide."""
    path = folder / PROJECTIONS
    if not path.is_file():
        return {}
    try:
        values: dict[str, Tensor] = load(path.read_bytes())
        return values
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read as projections; put back a copy, or delete it") from error
