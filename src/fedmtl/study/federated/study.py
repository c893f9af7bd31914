"""`fedmtl study federated`: which cells the tables need, and the folder that comes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from fedmtl.errors import ConfigError
from fedmtl.study.federated.asked import Asked
from fedmtl.study.federated.cells import Setup, setups
from fedmtl.study.federated.make import make_cells, open_base, seeds_of
from fedmtl.study.federated.page import write_study
from fedmtl.study.federated.results import Result, read_result
from fedmtl.study.federated.tables import Known
from fedmtl.study.folder import StudyFolder, note_asked
from fedmtl.study.grid import Outcome, Standing
from fedmtl.study.record import Keep, is_settled
from fedmtl.study.setups import cell_name, check_seeds, fits
from fedmtl.study.standing import run_written
from fedmtl.tasks.builtin import BUILTIN


def study_federated(
    folder: StudyFolder,
    asked: Asked,
    at_once: int,
    watch: Callable[[Standing], None] = lambda standing: None,
    keep: Keep = "models",
) -> list[Outcome]:
    """Run every cell the tables need, or go on with them; tables, figures and page are written after each cell.

    Cells that failed are an error at the end, when all others have their numbers.
    """
    check_seeds(asked.seeds)
    check_names(asked)
    every = setups(asked)
    wanted = wanted_setups(asked, every)
    cells = make_cells(asked, open_base(folder, asked), every, wanted)
    about = note_asked(folder, "federated", asdict(asked), at_once)
    metrics = {task: BUILTIN[task].metric for task in asked.tasks}
    read: dict[str, Result] = {}

    def write(standing: Standing) -> None:
        known = Known(wanted, metrics, read_results(folder, asked, wanted, read))
        write_study(folder, asked, about, known, standing)

    return run_written(folder, cells, at_once, write, watch, keep)


def check_names(asked: Asked) -> None:
    """Raise a ConfigError for a rate or a setting that is meant for no setup there is."""
    every = setups(replace(asked, choose=()))
    names = sorted({*every, *(setup.kind for setup in every.values())})
    for option, given in (("--rate", asked.named_rates), ("--set-for", asked.own_overrides)):
        for pattern, _ in given:
            if not any(fits(name, pattern) for name in names):
                raise ConfigError(f"{option}: no setup and no kind fits {pattern}; there are {', '.join(names)}")


def wanted_setups(asked: Asked, every: Mapping[str, Setup]) -> list[Setup]:
    """The setups that are asked for by name, in their order."""
    found = [setup for name, setup in every.items() if fits(name, asked.rows)]
    if not found:
        raise ConfigError(f"--rows: no setup fits {asked.rows}; there are {', '.join(every)}")
    return found


def read_results(
    folder: StudyFolder, asked: Asked, wanted: Sequence[Setup], read: dict[str, Result]
) -> dict[str, dict[int, Result | None]]:
    """By setup and seed what is finished, the cell of another setup where it has none of its own.

    `read` keeps what was read before: a finished cell does not change.
    """
    results: dict[str, dict[int, Result | None]] = {}
    for setup in wanted:
        own: dict[int, Result | None] = {}
        for seed in seeds_of(asked, setup, wanted):
            name = cell_name(setup.cell, seed)
            if name not in read and is_settled(folder.cell(name)):
                read[name] = read_result(folder.cell(name))
            own[seed] = read.get(name)
        results[setup.name] = own
    return results


def study_folder_name(asked: Asked) -> str:
    """The name of a study that was given none."""
    return f"federated{'-rates' if asked.choose else ''}{'-quick' if asked.quick else ''}"
