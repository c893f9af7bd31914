"""`fedmtl study compression`: which cells the tables need, and the folder that comes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError
from fedmtl.study.compression.asked import Asked
from fedmtl.study.compression.base import Base, open_base
from fedmtl.study.compression.cells import TEACHER, Setup, rows
from fedmtl.study.compression.make import make_cells, seeds_of
from fedmtl.study.compression.page import Shown, write_study
from fedmtl.study.compression.results import Result, Results, read_result
from fedmtl.study.compression.sizes import kept_sizes, measure_sizes
from fedmtl.study.folder import StudyFolder, is_done, note_asked
from fedmtl.study.grid import Cell, Outcome, Standing, run_grid
from fedmtl.study.record import Keep, is_settled, settle
from fedmtl.study.setups import cell_name, check_seeds, check_tables, fits
from fedmtl.study.standing import as_cells_end, refuse_failed

TABLES = (1, 2, 3, 4, 5, 6, 7)
# Off unless asked for: it trains a teacher for every task.
SINGLE = 7


@dataclass(frozen=True)
class Wanted:
    """The setups to run, each after the one it is made of, and the rows of each table."""

    setups: dict[str, Setup]
    rows: dict[int, list[str]]


def study_compression(
    folder: StudyFolder,
    asked: Asked,
    at_once: int,
    watch: Callable[[Standing], None] = lambda standing: None,
    say: Callable[[str], None] = lambda line: None,
    keep: Keep = "models",
) -> list[Outcome]:
    """Run every cell the tables need, or go on with them, and measure models when nothing runs any more.

    Tables, figures and page are written after each cell. Cells that failed are an error at the end.
    """
    _check(asked)
    base = open_base(folder, asked)
    wanted = wanted_setups(asked, base)
    cells = make_cells(folder, asked, base, wanted.setups)
    about = _about(folder, asked, at_once)
    measured = [cell_name(name, asked.seeds[0]) for name in wanted.rows.get(2, ()) if asked.measures]
    shown = Shown(folder, about, base, wanted.rows)

    def show(standing: Standing, results: Results) -> None:
        write_study(shown, results, standing, kept_sizes(folder, first_results(asked, wanted, results)))

    def write(standing: Standing) -> None:
        show(standing, read_results(folder, asked, base, wanted))

    outcomes = (
        run_grid(folder, cells, at_once, as_cells_end(write, watch), keep, measured)
        if asked.runs
        else _found(folder, cells)
    )
    results = read_results(folder, asked, base, wanted)
    if asked.measures:
        _measure(folder, asked, base, first_results(asked, wanted, results), say)
    show(Standing(len(cells), tuple(outcomes), {}, None), results)
    if keep == "scores" and asked.runs:
        for run in (folder.cell(name) for name in measured if is_settled(folder.cell(name))):
            settle(run, at_once, keep)
    refuse_failed(folder, outcomes)
    return outcomes


def _about(folder: StudyFolder, asked: Asked, at_once: int) -> dict[str, Any]:
    """What was asked of the cells: now, or, where nothing is run now, when they were."""
    if not asked.runs and folder.asked.exists():
        found: dict[str, Any] = parse_yaml(folder.asked.read_text(), str(folder.asked))
        return found
    return note_asked(folder, "compression", asdict(asked), at_once)


def _check(asked: Asked) -> None:
    check_tables(asked.tables, TABLES)
    check_seeds(asked.seeds)
    if asked.data is None and not asked.quick and asked.teacher is None:
        raise ConfigError("--data: missing; name a folder with sst2, mrpc, ..., or write --teacher or --quick")


def wanted_setups(asked: Asked, base: Base) -> Wanted:
    """What is asked for by table and by name, with the teachers that this needs."""
    every = base.setups
    named = {SINGLE} if asked.rows != "*" else set()
    listed = {number: own for number, own in rows(every, base.shapes).items() if number in {*asked.tables, *named}}
    if asked.quick and 2 in listed:
        # A model takes some ten seconds to write, quantize and time, however small it is.
        listed[2] = [TEACHER, f"{base.shapes.small}-uniform"]
    chosen = {number: _chosen(own, asked.rows) for number, own in listed.items()}
    used = {name for own in chosen.values() for name in own}
    if not used:
        known = ", ".join(dict.fromkeys(name for own in listed.values() for name in own))
        raise ConfigError(f"--rows: no setup fits {asked.rows}; these tables have {known}")
    needed = {over for name in used if (over := every[name].of) is not None}
    order = {name: setup for name, setup in every.items() if name in used | needed}
    return Wanted(order, {number: own for number, own in chosen.items() if own})


def _chosen(names: list[str], patterns: str) -> list[str]:
    """The rows that fit, with the teacher they are compared with where the table shows it."""
    fitting = [name for name in names if fits(name, patterns)]
    return [name for name in names if name in fitting or (fitting and name == TEACHER)]


def _found(folder: StudyFolder, cells: list[Cell]) -> list[Outcome]:
    """The cells that are finished, wherever they were trained."""
    outcomes = [Outcome(cell.name, "kept") for cell in cells if is_done(folder.cell(cell.name))]
    if not outcomes:
        raise ConfigError(f"--no-run: {folder.path} has no finished cell; run the study first, or give its --name")
    return outcomes


def read_results(folder: StudyFolder, asked: Asked, base: Base, wanted: Wanted) -> Results:
    """By setup and seed what is finished; a teacher that was given is every seed's."""
    results: dict[str, dict[int, Result | None]] = {}
    for name in wanted.setups:
        runs = {seed: folder.cell(cell_name(name, seed)) for seed in seeds_of(asked, name, wanted.setups)}
        results[name] = {seed: read_result(run) if is_settled(run) else None for seed, run in runs.items()}
    if base.teacher is not None:
        results[TEACHER] = dict.fromkeys(asked.seeds, read_result(base.teacher))
    return results


def first_results(asked: Asked, wanted: Wanted, results: Results) -> dict[str, Result]:
    """What is finished, with the first seed, of the models that are measured."""
    found = {name: results.get(name, {}).get(asked.seeds[0]) for name in wanted.rows.get(2, ())}
    return {name: result for name, result in found.items() if result is not None}


def _measure(
    folder: StudyFolder, asked: Asked, base: Base, results: Mapping[str, Result], say: Callable[[str], None]
) -> None:
    runs = {name: folder.cell(cell_name(name, asked.seeds[0])) for name in results}
    if base.teacher is not None and TEACHER in runs:
        runs[TEACHER] = base.teacher
    measure_sizes(folder, runs, results, base.config(), say)


def study_folder_name(asked: Asked) -> str:
    """The name of a study that was given none."""
    return "compression-quick" if asked.quick else "compression"
