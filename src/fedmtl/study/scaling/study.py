"""`fedmtl study scaling`: a grid of encoders, tasks and numbers of clients, and the folder that comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fedmtl.errors import ConfigError
from fedmtl.study.folder import StudyFolder, note_asked
from fedmtl.study.grid import Outcome, Standing
from fedmtl.study.record import Keep
from fedmtl.study.scaling.asked import Asked
from fedmtl.study.scaling.cells import make_cells
from fedmtl.study.scaling.page import write_study
from fedmtl.study.scaling.results import read_results
from fedmtl.study.scaling.verdicts import Known
from fedmtl.study.standing import run_written


def study_scaling(
    folder: StudyFolder,
    asked: Asked,
    at_once: int,
    watch: Callable[[Standing], None] = lambda standing: None,
    keep: Keep = "models",
) -> list[Outcome]:
    """Run every cell that is asked for, or go on with it; tables, figures and page are written after each cell.

    Cells that failed are an error at the end, when all others have their numbers.
    """
    cells = make_cells(asked)
    if not cells:
        raise ConfigError(f"--rows: no setup fits {asked.rows}; setups are called such as tiny-imdb-32")
    about = note_asked(folder, "scaling", asdict(asked), at_once)

    def write(standing: Standing) -> None:
        write_study(folder, about, Known(asked, read_results(folder, asked)), standing)

    return run_written(folder, cells, at_once, write, watch, keep)


def study_folder_name(asked: Asked) -> str:
    """The name of a study that was given none."""
    return "scaling" if asked.preset == "ours" else f"scaling-{asked.preset}"
