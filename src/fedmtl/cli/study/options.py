"""What the studies that run a grid have in common: options, and how lists of numbers are written."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from fedmtl.errors import ConfigError

Quick = Annotated[bool, typer.Option("--quick", help="The whole grid in miniature, on embedded data, in some minutes.")]
Rows = Annotated[
    str,
    typer.Option("--rows", help="Only setups whose names fit, such as 'joint*,epoch'.", metavar="PATTERNS"),
]


class Kept(Enum):
    """What of a finished cell's folder stays."""

    all = "all"
    models = "models"
    scores = "scores"


Jobs = Annotated[int | None, typer.Option(help="Cells at once; empty is what suits the machine.", min=1, metavar="N")]
Keep = Annotated[
    Kept, typer.Option(help="What stays of a finished cell: checkpoints too (all), its model, or its scores alone.")
]
StudyName = Annotated[
    str | None, typer.Option("--name", help="The study's folder in runs/; one that is there goes on.")
]


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """`0,1,2` as numbers, each once; `option` is named where they are not."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ConfigError(f"{option}: found {text}; write whole numbers with commas between, such as 0,1,2") from None
