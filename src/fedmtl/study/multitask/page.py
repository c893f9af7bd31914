"""The files of a study of multi-task methods: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from fedmtl.report.formats import score
from fedmtl.report.markup import Html
from fedmtl.study.figures import confusion, curves, residuals
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.measures import Measured
from fedmtl.study.multitask.cells import SMART, TASKS, Row
from fedmtl.study.multitask.tables import Results, make_table
from fedmtl.study.page import Content, write_pages
from fedmtl.study.standing import failure_words, standing_words

GUIDE = (
    "Scores are of the dev sets, after the last round; `average` is (accuracy + accuracy + (r + 1) / 2) / 3. `best on"
    " dev` is the best average of any evaluation, as the report chose its models: optimistic, as it is chosen by the"
    " examples it is scored on. Deviations are over seeds. The report's averages are recomputed from its scores."
    " Every row trains on the same number of examples, a single-task model on as many as a multi-task one, or a"
    " third. Seconds of training hold no evaluation."
)
BASELINE = "epoch"


def write_study(
    folder: StudyFolder,
    about: Mapping[str, Any],
    wanted: Mapping[int, Sequence[Row]],
    results: Results,
    standing: Standing,
) -> None:
    """Everything that can be shown of the cells that are finished."""
    content = Content(
        command="fedmtl study multitask",
        title="multi-task methods",
        opening=f"{_asked(about)} {standing_words(standing)}",
        guide=GUIDE,
        said=failure_words(standing),
        tables=[make_table(number, rows, results, TASKS) for number, rows in wanted.items()],
        pictures=make_figures(wanted, results),
        about=about,
        sheets={"cells": cells_csv(results)},
    )
    write_pages(folder, content)


def _asked(about: Mapping[str, Any]) -> str:
    data = "embedded, synthetic texts in miniature" if about["quick"] else about["data"]
    seeds = ", ".join(map(str, about["seeds"]))
    return f"Encoder {about['encoder']} on {data}; seeds {seeds}."


def cells_csv(results: Results) -> str:
    """One row for every finished cell, with all that was measured of it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = [(task, m) for task in TASKS for m in _METRICS["pair" if task == TASKS.similarity else "class"]]
    scored = [f"{when}_{task}_{metric}" for when in ("final", "best") for task, metric in metrics]
    head = ["cell", *scored, "final_average", "best_average", "best_round", *_COSTS, *(f"passes_{t}" for t in TASKS)]
    writer.writerow(head)
    for cell in (cell for cells in results.values() for cell in cells if cell is not None):
        values = [
            reached.scores.get(task, {}).get(metric) for reached in (cell.final, cell.best) for task, metric in metrics
        ]
        averages = [cell.final.average, cell.best.average, cell.best.round]
        passes = [cell.budget.passes.get(task) for task in TASKS]
        writer.writerow([cell.cell, *values, *averages, *(get(cell) for get in _COSTS.values()), *passes])
    return text.getvalue()


_METRICS = {"class": ("accuracy", "f1", "matthews"), "pair": ("pearson", "spearman", "mse", "rmse", "mae", "r2")}
_COSTS: dict[str, Callable[[Measured], object]] = {
    "parameters": lambda cell: cell.parameters,
    "trainable": lambda cell: cell.trainable,
    "trained_bytes": lambda cell: cell.trained_bytes,
    "model_bytes": lambda cell: cell.model_bytes,
    "steps": lambda cell: cell.budget.steps,
    "examples": lambda cell: cell.budget.examples,
    "train_seconds": lambda cell: cell.budget.train_seconds,
    "evaluate_seconds": lambda cell: cell.budget.evaluate_seconds,
    "device": lambda cell: cell.budget.device,
    "cells_at_once": lambda cell: cell.budget.cells_at_once,
}


def make_figures(wanted: Mapping[int, Sequence[Row]], results: Results) -> dict[str, tuple[str, Html]]:
    """The report's figures 2, 3 and 6 by file name, as far as their cells are finished."""
    pictures: dict[str, tuple[str, Html]] = {}
    best = best_setup(wanted, results)
    for number, name, setup in ((2, "best", best), (6, "baseline", BASELINE)):
        cell = next(iter(results.get(setup or "", ())), None)
        if cell is not None:
            pictures |= _mistakes(number, f"{name}, {setup}", cell)
    return pictures | _losses(results)


def best_setup(wanted: Mapping[int, Sequence[Row]], results: Results) -> str | None:
    """The multi-task setup with the best mean of final averages over its seeds."""
    multi = {row.setup for rows in wanted.values() for row in rows if not row.is_single}
    known: dict[str, float] = {}
    for setup in multi:
        averages = [cell.final.average for cell in results.get(setup, ()) if cell is not None]
        whole = [value for value in averages if value is not None]
        if whole and len(whole) == len(results[setup]):
            known[setup] = mean(whole)
    return max(known, key=lambda setup: (known[setup], setup), default=None)


def _mistakes(number: int, words: str, cell: Measured) -> dict[str, tuple[str, Html]]:
    """Confusion matrices and residuals of one model, from its last evaluation."""
    pictures: dict[str, tuple[str, Html]] = {}
    for task in TASKS:
        event, labels = cell.final.evaluations.get(task, {}), cell.labels.get(task, ())
        name = f"figure{number}-{task}"
        title = f"Figure {number}: {task}, {words}"
        if "confusion" in event:
            pictures[name] = (title, confusion(title, labels, event["confusion"]))
        elif "residuals" in event:
            found = event["residuals"]
            errors = f" (MSE {score(event['metrics'].get('mse'))}, R² {score(event['metrics'].get('r2'))})"
            pictures[name] = (title + errors, residuals(title, found["edges"], found["counts"]))
    return pictures


def _losses(results: Results) -> dict[str, tuple[str, Html]]:
    """Figure 3: the training loss by step, for ranks of LoRA and for weights of SMART."""
    families = {
        "lora": {f"r={rank}": f"lora-r{rank}-a8" for rank in (1, 4, 8, 16)},
        "smart": {f"λ={weight}": f"smart-radius{r}-weight{weight}" for r, weight in SMART if r == "1e-2"},
    }
    pictures: dict[str, tuple[str, Html]] = {}
    for family, members in families.items():
        for task in TASKS:
            cells = {name: next(iter(results.get(setup, ())), None) for name, setup in members.items()}
            lines = {name: _loss(cell, task) for name, cell in cells.items() if cell is not None}
            title = f"Figure 3: training loss of {task} by step, {family}"
            picture = curves(title, lines, "steps")
            if picture:
                pictures[f"figure3-{family}-{task}"] = (title, picture)
    return pictures


def _loss(cell: Measured, task: str) -> dict[int, float]:
    each = cell.budget.steps / max(cell.losses, default=1)
    return {round(number * each): loss[task] for number, loss in cell.losses.items() if task in loss}
