"""What the commands of studies that run a grid have in common: options, lists of numbers, the grid on the screen."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.study.progress import GridLines, make_grid_display
from fedmtl.cli.terminal import write
from fedmtl.errors import ConfigError

if TYPE_CHECKING:
    from fedmtl.study.folder import StudyFolder

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


Common = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a setting that the rows have in common.", metavar="KEY=VALUE"),
]


def show_study(name: str, jobs: int | None, run: Callable[[StudyFolder, int, GridLines], object]) -> None:
    """Run a study in the folder of that name in runs/, with its progress on the screen, and say where its pages are."""
    from fedmtl.study.folder import open_study
    from fedmtl.study.grid import suitable_at_once

    folder = open_study(Path("runs"), name)
    with make_grid_display() as display:
        run(folder, jobs or suitable_at_once(clients=1), display)
    write(f"{folder.page} and {folder.markdown}")


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """`0,1,2` as numbers, each once; `option` is named where they are not."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ConfigError(f"{option}: found {text}; write whole numbers with commas between, such as 0,1,2") from None
