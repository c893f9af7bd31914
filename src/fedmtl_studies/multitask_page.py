"""The study of multi-task methods, shown: the report's seven tables with its numbers and ours, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from fedmtl_studies.figures import Figures, confusion, curves, residuals
from fedmtl_studies.library import score
from fedmtl_studies.multitask_results import (
    ERRORS,
    METRICS,
    NOTES,
    PRINTED,
    SMART,
    TASKS,
    MeasuredCell,
    Printed,
    Row,
    average,
    slips,
)
from fedmtl_studies.page import Column, Page, Table, Value, cells_csv
from fedmtl_studies.results import Results as ResultsOf
from fedmtl_studies.results import finished, over_seeds, seconds_notes, single, spread

Results = ResultsOf[MeasuredCell]
Measure = Callable[[MeasuredCell], float | None]
# A column, and what it takes from a cell; None where it holds words.
Measuring = tuple[Column, Measure | None]

TITLES = {
    1: "Table 1: LoRA",
    2: "Table 2: adapters",
    3: "Table 3: SMART",
    4: "Table 4: combined models",
    5: "Table 5: baselines",
    6: "Table 6: schedules",
    7: "Table 7: errors of similarity",
}
_ERRORS = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}
# Three single-task models, each on the task it was trained on: table 5's rows in the order of the tasks.
SINGLE_TASKS = {
    "three single-task models": ("single-sentiment", "single-paraphrase", "single-similarity"),
    "three single-task models, a third of the steps each": (
        "third-sentiment", "third-paraphrase", "third-similarity",
    ),
}  # fmt: skip


def make_table(number: int, rows: Sequence[Row], results: Results) -> Table:
    """Return one table; a row without its cells is there, empty."""
    if number == 7:
        return _error_table(rows, results)
    columns: list[Measuring] = [(Column("configuration", "configuration", "words"), None)]
    columns += _size_columns(number) + _score_columns()
    printed = Column("report: SST / PARA / STS, average, time", "report", "words")
    columns += [(printed, None), *_budget_columns(), *(_pass_columns() if number == 6 else [])]
    columns.append((Column("device", "device", "words"), None))
    made = [_row(row, columns, results, PRINTED[number].get(row.report or "")) for row in rows]
    if number == 5:
        shown = {row.setup for row in rows}
        made += [
            _single_tasks(words, setups, columns, results)
            for words, setups in SINGLE_TASKS.items()
            if shown.issuperset(setups)
        ]
    return Table(
        f"table{number}",
        TITLES[number],
        tuple(column for column, _ in columns),
        tuple(made),
        (
            *NOTES.get(number, ()),
            *slips(number),
            *seconds_notes(cell.budget.cells_at_once for cell in finished(results, [row.setup for row in rows])),
        ),
    )


def _score_columns() -> list[Measuring]:
    scored: list[Measuring] = [
        (Column(f"{task} {'r' if metric == 'pearson' else 'acc'}", f"{task}_{metric}"), _final(task, metric))
        for task, metric in METRICS
    ]
    return [
        *scored,
        (Column("average", "average"), lambda cell: cell.final.average),
        (Column("best on dev", "best_average"), lambda cell: cell.best.average),
    ]


def _final(task: str, metric: str) -> Measure:
    return lambda cell: cell.final.scores.get(task, {}).get(metric)


def _size_columns(number: int) -> list[Measuring]:
    if number not in (1, 2):
        return []
    return [
        (Column("trainable", "trainable", "count"), lambda cell: float(cell.trainable)),
        (Column("report: trainable", "report_trainable", "count"), None),
        (Column("trained values", "trained_bytes", "bytes"), lambda cell: float(cell.trained_bytes)),
        (Column("model folder", "model_bytes", "bytes"), lambda cell: float(cell.model_bytes)),
        (
            Column("memory", "peak_bytes", "bytes"),
            lambda cell: None if cell.peak_bytes is None else float(cell.peak_bytes),
        ),
    ]


def _budget_columns() -> list[Measuring]:
    return [
        (Column("steps", "steps", "count"), lambda cell: float(cell.budget.steps)),
        (Column("examples", "examples", "count"), lambda cell: float(cell.budget.examples)),
        (Column("training", "train_seconds", "seconds"), lambda cell: cell.budget.train_seconds),
        (Column("evaluation", "evaluate_seconds", "seconds"), lambda cell: cell.budget.evaluate_seconds),
    ]


def _pass_columns() -> list[Measuring]:
    def passes(task: str) -> Measure:
        return lambda cell: cell.budget.passes.get(task)

    return [(Column(f"passes {task}", f"passes_{task}", "number"), passes(task)) for task in TASKS]


def _row(row: Row, columns: Sequence[Measuring], results: Results, printed: Printed | None) -> tuple[Value, ...]:
    first = next(iter(results.get(row.setup, {}).values()), None)
    stated: dict[str, Value] = {
        "configuration": row.words,
        "report": _printed(printed),
        "report_trainable": single(printed.parameters if printed else None),
        "device": first.budget.device if first else None,
    }
    return tuple(
        stated[column.key] if measure is None else over_seeds(results, row.setup, measure)
        for column, measure in columns
    )


def _printed(row: Printed | None) -> str | None:
    if row is None:
        return None
    scores = " / ".join(score(value) for value in (row.sst, row.para, row.sts))
    return f"{scores}, {score(row.recomputed)}, {row.time}"


def _single_tasks(
    words: str, setups: Sequence[str], columns: Sequence[Measuring], results: Results
) -> tuple[Value, ...]:
    """Return what three single-task models reach together, each on the task it was trained on."""
    runs = [results.get(name, {}).values() for name in setups]
    scores: dict[str, list[float | None]] = {f"{task}_{metric}": [] for task, metric in METRICS}
    averages: list[float | None] = []
    for seed in zip(*runs, strict=False):
        found = [
            None if cell is None else cell.final.scores.get(task, {}).get(metric)
            for cell, (task, metric) in zip(seed, METRICS, strict=True)
        ]
        for key, value in zip(scores, found, strict=True):
            scores[key].append(value)
        averages.append(None if None in found else average(*found))  # type: ignore[arg-type]
    theirs = [PRINTED[5][f"Baseline Finetune {name}"] for name in ("SST", "Para", "STS")]
    stated: dict[str, Value] = {
        "configuration": words,
        **{key: spread(values) for key, values in scores.items()},
        "average": spread(averages),
        "report": f"{score(theirs[0].sst)} / {score(theirs[1].para)} / {score(theirs[2].sts)},"
        f" {score(average(theirs[0].sst, theirs[1].para, theirs[2].sts))}"
        if setups[0].startswith("single")
        else None,
    }
    return tuple(stated.get(column.key) for column, _ in columns)


def _error_table(rows: Sequence[Row], results: Results) -> Table:
    columns = [Column("model", "model", "words"), Column("setup", "setup", "words")]
    for key, name in _ERRORS.items():
        columns += [Column(name, key), Column(f"report: {name}", f"report_{key}", "words")]
    made: list[tuple[Value, ...]] = []
    for row in rows:
        values: list[Value] = [row.words, row.setup]
        for key in _ERRORS:
            values.append(over_seeds(results, row.setup, _final(TASKS.similarity, key)))
            values.append(score(ERRORS[row.report or ""][key]))
        made.append(tuple(values))
    return Table("table7", TITLES[7], tuple(columns), tuple(made), NOTES[7])


GUIDE = (
    "Scores are of the dev sets, after the last round; `average` is (accuracy + accuracy + (r + 1) / 2) / 3. `best on"
    " dev` is the best average of any evaluation, as the report chose its models: optimistic, as it is chosen by the"
    " examples it is scored on. Deviations are over seeds. The report's averages are recomputed from its scores."
    " Every row trains on the same number of examples, a single-task model on as many as a multi-task one, or a"
    " third. Seconds of training hold no evaluation. Memory is the most that training and evaluation took, on a GPU or,"
    " without one, in the process beside its imports."
)
BASELINE = "epoch"


_METRICS = {"class": ("accuracy", "f1", "matthews"), "pair": ("pearson", "spearman", "mse", "rmse", "mae", "r2")}
_COSTS: dict[str, Callable[[MeasuredCell], object]] = {
    "parameters": lambda cell: cell.parameters,
    "trainable": lambda cell: cell.trainable,
    "trained_bytes": lambda cell: cell.trained_bytes,
    "model_bytes": lambda cell: cell.model_bytes,
    "peak_bytes": lambda cell: cell.peak_bytes,
    "steps": lambda cell: cell.budget.steps,
    "examples": lambda cell: cell.budget.examples,
    "train_seconds": lambda cell: cell.budget.train_seconds,
    "evaluate_seconds": lambda cell: cell.budget.evaluate_seconds,
    "device": lambda cell: cell.budget.device,
    "cells_at_once": lambda cell: cell.budget.cells_at_once,
}


def show(opening: str, wanted: Mapping[int, Sequence[Row]], results: Results) -> Page:
    """Return everything that can be shown of the cells that are finished."""
    return Page(
        opening=opening,
        guide=GUIDE,
        tables=[make_table(number, rows, results) for number, rows in wanted.items()],
        figures=make_figures(wanted, results),
        sheets={"cells": cells_csv(finished(results), _cell_columns())},
    )


def _cell_columns() -> dict[str, Callable[[MeasuredCell], object]]:
    """Return the columns of the table of cells, with all that was measured of each."""

    def scored(when: str, task: str, metric: str) -> Callable[[MeasuredCell], object]:
        return lambda cell: getattr(cell, when).scores.get(task, {}).get(metric)

    def passes(task: str) -> Callable[[MeasuredCell], object]:
        return lambda cell: cell.budget.passes.get(task)

    return {
        "cell": lambda cell: cell.cell,
        **{
            f"{when}_{task}_{metric}": scored(when, task, metric)
            for when in ("final", "best")
            for task in TASKS
            for metric in _METRICS["pair" if task == TASKS.similarity else "class"]
        },
        "final_average": lambda cell: cell.final.average,
        "best_average": lambda cell: cell.best.average,
        "best_round": lambda cell: cell.best.round,
        **_COSTS,
        **{f"passes_{task}": passes(task) for task in TASKS},
    }


def make_figures(wanted: Mapping[int, Sequence[Row]], results: Results) -> Figures:
    """Return the report's figures 2, 3 and 6, as far as their cells are finished."""
    figures: Figures = {}
    best = best_setup(wanted, results)
    for number, name, setup in ((2, "best", best), (6, "baseline", BASELINE)):
        cell = next(iter(results.get(setup or "", {}).values()), None)
        if cell is not None:
            figures |= _mistakes(number, f"{name}, {setup}", cell)
    return figures | _losses(results)


def best_setup(wanted: Mapping[int, Sequence[Row]], results: Results) -> str | None:
    """Return the multi-task setup with the best mean of final averages over its seeds."""
    multi = {row.setup for rows in wanted.values() for row in rows if not row.is_single}
    known: dict[str, float] = {}
    for setup in multi:
        averages = [cell.final.average for cell in results.get(setup, {}).values() if cell is not None]
        whole = [value for value in averages if value is not None]
        if whole and len(whole) == len(results[setup]):
            known[setup] = mean(whole)
    return max(known, key=lambda setup: (known[setup], setup), default=None)


def _mistakes(number: int, words: str, cell: MeasuredCell) -> Figures:
    """Draw confusion matrices and residuals of one model, from its last evaluation."""
    figures: Figures = {}
    for task in TASKS:
        event, labels = cell.final.evaluations.get(task), cell.labels.get(task, ())
        if event is None:
            continue
        name = f"figure{number}-{task}"
        title = f"Figure {number}: {task}, {words}"
        if event.confusion is not None:
            figures[name] = (title, confusion(title, labels, event.confusion))
        elif event.residuals is not None:
            errors = f" (MSE {score(event.metrics.get('mse'))}, R² {score(event.metrics.get('r2'))})"
            figures[name] = (title + errors, residuals(title, event.residuals.edges, event.residuals.counts))
    return figures


def _losses(results: Results) -> Figures:
    """Draw figure 3: the training loss by step, for ranks of LoRA and for weights of SMART."""
    families = {
        "lora": {f"r={rank}": f"lora-r{rank}-a8" for rank in (1, 4, 8, 16)},
        "smart": {f"λ={weight}": f"smart-radius{r}-weight{weight}" for r, weight in SMART if r == "1e-2"},
    }
    figures: Figures = {}
    for family, members in families.items():
        for task in TASKS:
            cells = {name: next(iter(results.get(setup, {}).values()), None) for name, setup in members.items()}
            lines = {name: _loss(cell, task) for name, cell in cells.items() if cell is not None}
            title = f"Figure 3: training loss of {task} by step, {family}"
            figure = curves(title, lines, "steps")
            if figure:
                figures[f"figure3-{family}-{task}"] = (title, figure)
    return figures


def _loss(cell: MeasuredCell, task: str) -> dict[int, float]:
    each = cell.budget.steps / max(cell.losses, default=1)
    values = ((number, losses.get(task)) for number, losses in cell.losses.items())
    return {round(number * each): value for number, value in values if value is not None}
