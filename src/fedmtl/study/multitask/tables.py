"""The report's seven tables with our numbers, its own beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedmtl.report.formats import score
from fedmtl.study.measures import Average, Measured, Scores, Spread, spread
from fedmtl.study.multitask.cells import Row, Tasks
from fedmtl.study.multitask.report import ERRORS, NOTES, PRINTED, Printed, average, slips
from fedmtl.study.tables import Column, Table, Value

Results = Mapping[str, Sequence[Measured | None]]
Measure = Callable[[Measured], float | None]
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
# Three single-task models, each on its own task: table 5's rows in the order of the tasks.
OWN_TASKS = {
    "three single-task models": ("single-sentiment", "single-paraphrase", "single-similarity"),
    "three single-task models, a third of the steps each": (
        "third-sentiment", "third-paraphrase", "third-similarity",
    ),
}  # fmt: skip


def average_of(tasks: Tasks) -> Average:
    """The report's average of a model's scores; None where one is missing or undefined."""

    def mean(scores: Scores) -> float | None:
        found = [scores.get(task, {}).get(metric) for task, metric in _metrics(tasks)]
        return None if None in found else average(*found)  # type: ignore[arg-type]

    return mean


def _metrics(tasks: Tasks) -> list[tuple[str, str]]:
    return [(tasks.sentiment, "accuracy"), (tasks.paraphrase, "accuracy"), (tasks.similarity, "pearson")]


def make_table(number: int, rows: Sequence[Row], results: Results, tasks: Tasks) -> Table:
    """One table; a row without its cells is there, empty."""
    if number == 7:
        return _error_table(rows, results, tasks)
    columns: list[Measuring] = [(Column("configuration", "configuration", "words"), None)]
    columns += _size_columns(number) + _score_columns(tasks)
    printed = Column("report: SST / PARA / STS, average, time", "report", "words")
    columns += [(printed, None), *_budget_columns(), *(_pass_columns(tasks) if number == 6 else [])]
    columns.append((Column("device", "device", "words"), None))
    made = [_row(row, columns, results.get(row.setup, ()), PRINTED[number].get(row.report or "")) for row in rows]
    if number == 5:
        shown = {row.setup for row in rows}
        made += [
            _own_tasks(words, setups, columns, results, tasks)
            for words, setups in OWN_TASKS.items()
            if shown.issuperset(setups)
        ]
    return Table(
        f"table{number}",
        TITLES[number],
        tuple(column for column, _ in columns),
        tuple(made),
        (*NOTES.get(number, ()), *slips(number), *_shared_machine(rows, results)),
    )


def _score_columns(tasks: Tasks) -> list[Measuring]:
    scored: list[Measuring] = [
        (Column(f"{task} {'r' if metric == 'pearson' else 'acc'}", f"{task}_{metric}"), _final(task, metric))
        for task, metric in _metrics(tasks)
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
    ]


def _budget_columns() -> list[Measuring]:
    return [
        (Column("steps", "steps", "count"), lambda cell: float(cell.budget.steps)),
        (Column("examples", "examples", "count"), lambda cell: float(cell.budget.examples)),
        (Column("training", "train_seconds", "seconds"), lambda cell: cell.budget.train_seconds),
        (Column("evaluation", "evaluate_seconds", "seconds"), lambda cell: cell.budget.evaluate_seconds),
    ]


def _pass_columns(tasks: Tasks) -> list[Measuring]:
    def passes(task: str) -> Measure:
        return lambda cell: cell.budget.passes.get(task)

    return [(Column(f"passes {task}", f"passes_{task}", "number"), passes(task)) for task in tasks]


def _row(
    row: Row,
    columns: Sequence[Measuring],
    cells: Sequence[Measured | None],
    printed: Printed | None,
) -> tuple[Value, ...]:
    said: dict[str, Value] = {
        "configuration": row.words,
        "report": _printed(printed),
        "report_trainable": Spread(printed.parameters, None, 1) if printed and printed.parameters else None,
        "device": cells[0].budget.device if cells and cells[0] else None,
    }
    return tuple(said[column.key] if measure is None else _over(cells, measure) for column, measure in columns)


def _over(cells: Sequence[Measured | None], measure: Measure) -> Spread | None:
    return spread([None if cell is None else measure(cell) for cell in cells])


def _printed(row: Printed | None) -> str | None:
    if row is None:
        return None
    scores = " / ".join(score(value) for value in (row.sst, row.para, row.sts))
    return f"{scores}, {score(row.recomputed)}, {row.time}"


def _own_tasks(
    words: str, setups: Sequence[str], columns: Sequence[Measuring], results: Results, tasks: Tasks
) -> tuple[Value, ...]:
    """What three single-task models reach together: each is asked about the task it was trained on."""
    runs = [results.get(name, ()) for name in setups]
    own: dict[str, list[float | None]] = {f"{task}_{metric}": [] for task, metric in _metrics(tasks)}
    averages: list[float | None] = []
    for seed in zip(*runs, strict=False):
        found = [
            None if cell is None else cell.final.scores.get(task, {}).get(metric)
            for cell, (task, metric) in zip(seed, _metrics(tasks), strict=True)
        ]
        for key, value in zip(own, found, strict=True):
            own[key].append(value)
        averages.append(None if None in found else average(*found))  # type: ignore[arg-type]
    theirs = [PRINTED[5][f"Baseline Finetune {name}"] for name in ("SST", "Para", "STS")]
    said: dict[str, Value] = {
        "configuration": words,
        **{key: spread(values) for key, values in own.items()},
        "average": spread(averages),
        "report": f"{score(theirs[0].sst)} / {score(theirs[1].para)} / {score(theirs[2].sts)},"
        f" {score(average(theirs[0].sst, theirs[1].para, theirs[2].sts))}"
        if setups[0].startswith("single")
        else None,
    }
    return tuple(said.get(column.key) for column, _ in columns)


def _error_table(rows: Sequence[Row], results: Results, tasks: Tasks) -> Table:
    columns = [Column("model", "model", "words"), Column("setup", "setup", "words")]
    for key, name in _ERRORS.items():
        columns += [Column(name, key), Column(f"report: {name}", f"report_{key}", "words")]
    made: list[tuple[Value, ...]] = []
    for row in rows:
        cells = results.get(row.setup, ())
        values: list[Value] = [row.words, row.setup]
        for key in _ERRORS:
            values.append(_over(cells, _final(tasks.similarity, key)))
            values.append(score(ERRORS[row.report or ""][key]))
        made.append(tuple(values))
    return Table("table7", TITLES[7], tuple(columns), tuple(made), NOTES[7])


def _shared_machine(rows: Sequence[Row], results: Results) -> list[str]:
    most = max((cell.budget.cells_at_once for row in rows for cell in results.get(row.setup, ()) if cell), default=1)
    return [f"Seconds were taken with up to {most} cells at once on the machine."] if most > 1 else []
