"""`fedmtl study multitask`: which cells the tables need, and the folder that comes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedmtl.config.file import with_absolute_paths, with_overrides
from fedmtl.errors import ConfigError
from fedmtl.study.folder import StudyFolder, note_asked
from fedmtl.study.grid import Cell, Outcome, Standing
from fedmtl.study.measures import Measured, read_cell
from fedmtl.study.multitask.asked import TABLES, Asked
from fedmtl.study.multitask.cells import NEVER, TASKS, Row, Setup, rows, setups
from fedmtl.study.multitask.data import write_embedded, write_sentiment
from fedmtl.study.multitask.page import write_study
from fedmtl.study.multitask.tables import average_of
from fedmtl.study.record import Keep, is_settled
from fedmtl.study.setups import Settings, cell_name, check_seeds, check_tables, fits, merged
from fedmtl.study.standing import run_written


def study_multitask(
    folder: StudyFolder,
    asked: Asked,
    at_once: int,
    watch: Callable[[Standing], None] = lambda standing: None,
    keep: Keep = "models",
) -> list[Outcome]:
    """Run every cell the tables need, or go on with them; tables, figures and page are written after each cell.

    Cells that failed are an error at the end, when all others have their numbers.
    """
    _check(asked)
    wanted = wanted_rows(asked)
    base = base_settings(folder, asked)
    cells = make_cells(asked, base, wanted, sentiment_source(folder, asked, base))
    about = note_asked(folder, "multitask", asdict(asked), at_once)

    def write(standing: Standing) -> None:
        write_study(folder, about, wanted, read_results(folder, asked, wanted), standing)

    return run_written(folder, cells, at_once, write, watch, keep)


def _check(asked: Asked) -> None:
    check_tables(asked.tables, TABLES)
    check_seeds(asked.seeds)
    if asked.steps < asked.epochs:
        raise ConfigError(f"--steps: found {asked.steps}, fewer than the {asked.epochs} of --epochs; write more")
    if asked.data is None and not asked.quick:
        raise ConfigError("--data: missing; name a folder with sst5, qqp, stsb and cfimdb, or write --quick")


def wanted_rows(asked: Asked) -> dict[int, list[Row]]:
    """The rows that are asked for, by table; a table that has none of them is left out."""
    every = rows(asked.tables, has_cfimdb=asked.cfimdb)
    named = {number: [row for row in listed if fits(row.setup, asked.rows)] for number, listed in every.items()}
    found = {number: listed for number, listed in named.items() if listed}
    if not found:
        known = ", ".join(dict.fromkeys(row.setup for listed in every.values() for row in listed))
        raise ConfigError(f"--rows: no setup fits {asked.rows}; these tables have {known}")
    return found


def base_settings(folder: StudyFolder, asked: Asked) -> Settings:
    """What all cells have in common: the report's settings, the user's data and overrides."""
    root = str(folder.path / "data/embedded") if asked.quick else asked.data
    if asked.quick:
        write_embedded(Path(str(root)))
    sizes = {"train_samples": 240, "val_samples": 60} if asked.quick else {}
    base = {
        "mode": "centralized",
        "model": {"server_model": asked.encoder, "pair": "cross", "head_dropout": 0.3},
        "data": {"root": root, "source": "files"},
        "tasks": {TASKS.sentiment: sizes, TASKS.paraphrase: {**sizes, "outputs": 1}, TASKS.similarity: sizes},
        "training": {
            "num_rounds": asked.epochs,
            "local_steps": asked.steps // asked.epochs,
            "batch_size": asked.batch_size,
            # 1e-5 is the report's, for BERT-base; a few steps of a tiny encoder would not move by it.
            "learning_rate": 1e-3 if asked.quick else 1e-5,
            "weight_decay": 0.0,
            "task_schedule": "annealed",
        },
        # Some rows cannot train in a stack, which on a GPU is in bf16: a row must not differ by that.
        "compute": {"stack": 0},
    }
    return with_overrides(with_absolute_paths(base, Path.cwd()), asked.overrides)


def sentiment_source(folder: StudyFolder, asked: Asked, base: Mapping[str, Any]) -> dict[str, str] | None:
    """The file of SST's and CFIMDB's rows, written into the study's folder; None where CFIMDB is left out."""
    if not asked.cfimdb:
        return None
    return write_sentiment(Path(base["data"]["root"]), folder.path / "data/sst5_cfimdb.tsv")


def make_cells(
    asked: Asked, base: Settings, wanted: Mapping[int, Sequence[Row]], source: dict[str, str] | None
) -> list[Cell]:
    """The cells of all rows, each once; the first seed of every row comes before the second of any."""
    named = setups(TASKS, base["training"]["batch_size"])
    used = list(dict.fromkeys(row.setup for listed in wanted.values() for row in listed))
    return [
        _cell(cell_name(name, seed), named[name], base, seed, source)
        for seed in asked.seeds
        for name in used
        if seed in seeds_of(asked, name)
    ]


def seeds_of(asked: Asked, setup: str) -> tuple[int, ...]:
    """The seeds a setup runs with: all where its name fits one of `seed_rows`, else the first alone."""
    return asked.seeds if fits(setup, asked.seed_rows) else asked.seeds[:1]


def _cell(name: str, setup: Setup, base: Settings, seed: int, source: dict[str, str] | None) -> Cell:
    settings = merged(merged(base, setup.settings), {"seed": seed})
    training = settings["training"]
    steps = max(1, round(training["local_steps"] * setup.share))
    tasks: Settings = {task: {"from_round": NEVER} for task in TASKS if setup.trains not in (None, task)}
    if source is not None and not setup.without_cfimdb:
        tasks = merged(tasks, {TASKS.sentiment: {"source": source}})
    # A rate given with --set may be in words, such as 1e-4.
    rate = float(training["learning_rate"]) * setup.rate
    settings = merged(settings, {"training": {"local_steps": steps, "learning_rate": rate}, "tasks": tasks})
    return Cell(name, settings, work=float(training["num_rounds"] * steps * training["batch_size"]))


def read_results(
    folder: StudyFolder, asked: Asked, wanted: Mapping[int, Sequence[Row]]
) -> dict[str, list[Measured | None]]:
    """By setup, a finished cell's measures for every seed it is to run with; None where it is not finished."""
    average = average_of(TASKS)
    results: dict[str, list[Measured | None]] = {}
    for name in dict.fromkeys(row.setup for listed in wanted.values() for row in listed):
        runs = [folder.cell(cell_name(name, seed)) for seed in seeds_of(asked, name)]
        results[name] = [read_cell(run, average) if is_settled(run) else None for run in runs]
    return results
