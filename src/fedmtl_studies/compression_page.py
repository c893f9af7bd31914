"""The study of compression, shown: its tables with the slides' and the paper's numbers beside ours, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import mean

from fedmtl_studies.compression_results import (
    GLUE,
    LOAD,
    NOTES,
    PAPER,
    SIZES,
    SLIDES,
    Printed,
    Result,
    Size,
    Sizes,
    glue_average,
    retained,
    retention,
    slips,
)
from fedmtl_studies.compression_setups import AUGMENTED, TEACHER, Setup, Shapes, large_name
from fedmtl_studies.figures import Figures
from fedmtl_studies.library import (
    PLOT_STYLE,
    Bar,
    Frame,
    Html,
    Measured,
    Teacher,
    Timing,
    Variant,
    bar_chart,
    bar_range,
    join,
    percent,
    tag,
    variants_plot,
)
from fedmtl_studies.page import Column, Page, Table, Value, cells_csv, metric_columns
from fedmtl_studies.results import Results as ResultsOf
from fedmtl_studies.results import Spread, beside, finished, over_seeds, seconds_notes, single

Results = ResultsOf[Result]
Measure = Callable[[Result], float | None]

GUIDE = (
    "Scores are of the dev sets, after the last pass. A `%` is the share of the teacher's score that is left, with the"
    " teacher of the same seed; `mean of %` is its mean over tasks. The GLUE average is the mean of"
    " main metrics over those of GLUE's eight tasks that are here. A task is named as no better than a constant where"
    " the model's score equals the majority class's, or it gives one answer to all. Deviations are over seeds. The"
    " numbers of the slides and of the paper are their own; ratios are recomputed from them."
)
NO_AUGMENTATION = "No --augment was given: students that learn on altered copies of the texts are left out."
TITLES = {
    1: "Table 1: what is left of the teacher's scores",
    2: "Table 2: size and speed",
    3: "Table 3: layer maps",
    4: "Table 4: augmentation",
    5: "Table 5: pruning",
    6: "Table 6: stages",
    7: "Table 7: a teacher for each task",
}
MARKED = "no better than a constant"
FORMS = {"fedmtl": "fedmtl", "onnx": "ONNX", "int8": "INT8 ONNX"}
STYLE = " ".join(f".bar .class{n} {{ fill: var(--c) }}" for n in range(7)) + PLOT_STYLE


@dataclass(frozen=True)
class Shown:
    """What a page is made of but for results: every setup, every task's main metric, and the rows of each table."""

    opening: str
    setups: Mapping[str, Setup]
    metrics: Mapping[str, str]
    shapes: Shapes
    rows: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class Known:
    """What tables are made of: every setup, every task's main metric, and the results so far."""

    setups: Mapping[str, Setup]
    metrics: Mapping[str, str]
    shapes: Shapes
    results: Results

    @property
    def tasks(self) -> list[str]:
        return list(self.metrics)


def show(shown: Shown, has_augmentation: bool, results: Results, sizes: Sizes) -> Page:
    """Return everything that can be shown of the cells that are finished and the models that are measured."""
    known = Known(shown.setups, shown.metrics, shown.shapes, results)
    return Page(
        opening=shown.opening,
        guide=GUIDE,
        tables=[make_table(number, names, known, sizes) for number, names in sorted(shown.rows.items())],
        figures=make_figures(shown.rows, known, sizes),
        remarks=[] if has_augmentation else [NO_AUGMENTATION],
        sheets={"cells": cells_csv(finished(results), _cell_columns(finished(results), known.tasks))},
        style=STYLE,
    )


def _cell_columns(cells: Sequence[Result], tasks: Sequence[str]) -> dict[str, Callable[[Result], object]]:
    """Return the columns of the table of cells, with all metrics of its tasks."""
    costs = ("parameters", "model_bytes", "examples", "copies", "seconds", "device", "cells_at_once")
    return {
        "cell": lambda cell: cell.cell,
        **metric_columns(cells, tasks),
        "marked": lambda cell: " ".join(cell.marked),
        **{name: attrgetter(name) for name in costs},
    }


def make_table(number: int, names: Sequence[str], known: Known, sizes: Sizes) -> Table:
    """Return one table; a row without its cells is there, empty."""
    if number == 2:
        return _size_table(known, sizes)
    if number == 7:
        return _single_table(names, known)
    extra = _extra_columns(number)
    columns = [
        Column("model", "model", "words"), Column("setup", "setup", "words"),
        *_score_columns(known), *_glue_column(known), Column("mean of %", "mean_retention", "percent"),
        Column(MARKED, "marked", "words"),
        *(column for column, _ in extra), Column("device", "device", "words"),
    ]  # fmt: skip
    made = [_row(name, known, [measure for _, measure in extra]) for name in names]
    if number == 1:
        made += [row for printed in (SLIDES, PAPER) for row in _printed_rows(printed, known, len(columns))]
    notes = (
        *NOTES.get(number, ()),
        *slips(number),
        *seconds_notes(one.cells_at_once for one in finished(known.results, names)),
    )
    return Table(f"table{number}", TITLES[number], tuple(columns), tuple(made), notes)


def _score_columns(known: Known) -> list[Column]:
    return [
        column
        for task, metric in known.metrics.items()
        for column in (
            Column(f"{task} {metric}", f"{task}_{metric}"),
            Column(f"{task} %", f"{task}_retention", "percent"),
        )
    ]


def _glue_column(known: Known) -> list[Column]:
    """Return the column of GLUE's average, which is there for two tasks of the eight or more."""
    num_tasks = sum(task in GLUE for task in known.tasks)
    return [Column(f"GLUE average of {num_tasks}", "glue_average")] if num_tasks > 1 else []


def _extra_columns(number: int) -> list[tuple[Column, Measure]]:
    sparsity: list[tuple[Column, Measure]] = [
        (Column("zeros, linear", "zeros_linear", "percent"), lambda one: one.zeros[0] if one.zeros else None),
        (Column("zeros, all", "zeros_all", "percent"), lambda one: one.zeros[1] if one.zeros else None),
    ]
    copies: list[tuple[Column, Measure]] = [(Column("copies", "copies", "count"), lambda one: float(one.copies))]
    return [
        *(sparsity if number == 5 else copies if number == 4 else []),
        (Column("parameters", "parameters", "count"), lambda one: float(one.parameters)),
        (Column("examples", "examples", "count"), lambda one: float(one.examples)),
        (Column("seconds", "seconds", "seconds"), lambda one: one.seconds),
    ]


def _row(name: str, known: Known, extra: Sequence[Measure]) -> tuple[Value, ...]:
    results, cells = known.results, list(known.results.get(name, {}).values())
    values: list[Value] = [known.setups[name].words, name]
    for task in known.tasks:
        values.append(over_seeds(results, name, lambda one, task=task: one.scores.get(task)))  # type: ignore[misc]
        values.append(None if name == TEACHER else _retention_of(results, name, TEACHER, [task]))
    if _glue_column(known):
        values.append(over_seeds(results, name, lambda one: glue_average(one.scores, known.tasks)))
    values.append(None if name == TEACHER else _retention_of(results, name, TEACHER, known.tasks))
    values.append(marked_words(cells))
    values += [over_seeds(results, name, measure) for measure in extra]
    return (*values, cells[0].device if cells and cells[0] else None)


def _retention_of(results: Results, name: str, teacher: str, tasks: Sequence[str]) -> Spread | None:
    return beside(results, name, teacher, lambda one, over: retained(one, over, tasks))


def marked_words(cells: Sequence[Result | None]) -> str | None:
    """Return the tasks on which a model answers no better than a constant, in any seed."""
    return ", ".join(dict.fromkeys(task for cell in cells if cell is not None for task in cell.marked)) or None


def _printed_rows(printed: Printed, known: Known, width: int) -> list[tuple[Value, ...]]:
    """Return the teacher's and the student's row; retention is recomputed from their scores."""
    if not set(known.tasks) & set(printed.student):
        return []
    kinds = (
        (printed.teacher_words, printed.teacher, False),
        (printed.student_words, printed.student, True),
    )
    made = []
    for words, scores, is_student in kinds:
        values: list[Value] = [words, None]
        for task in known.tasks:
            left = retention(scores.get(task), printed.teacher.get(task)) if is_student else None
            values += [single(scores.get(task)), single(left)]
        if _glue_column(known):
            values.append(single(glue_average(scores, known.tasks)))
        made.append((*values, *(None,) * (width - len(values))))
    return made


def _size_table(known: Known, sizes: Sizes) -> Table:
    columns = [
        Column("model", "model", "words"), Column("form", "form", "words"),
        Column("size", "bytes", "bytes"), Column("of teacher's", "size_share", "percent"),
        Column("compressed", "compressed_bytes", "bytes"), Column("parameters", "parameters", "count"),
        Column("FLOPs", "flops", "count"), Column("memory", "peak_bytes", "bytes"),
        Column("ms", "milliseconds", "number"), Column("p95 ms", "p95_milliseconds", "number"),
        Column("times as fast", "speedup", "number"), Column("mean of %", "mean_retention", "percent"),
    ]  # fmt: skip
    above = {row.form: row for row in sizes.rows if row.setup == TEACHER}
    made = [_size_row(row, above, known) for row in sizes.rows]
    whole = SIZES[0]
    made += [
        (
            row.words, "ONNX" if "Q" in row.words else None, single(row.megabytes * 1e6),
            single(row.megabytes / whole.megabytes), None, None, None, None, single(row.milliseconds), None,
            single(whole.milliseconds / row.milliseconds), None,
        )
        for row in SIZES
    ]  # fmt: skip
    how = (
        "One text of 128 tokens at a time, one thread, on the CPU of the machine that wrote this page; median and 95th"
        " percentile. Size is what is shipped: the model's folder, or the ONNX file; compressed is zlib's. Times as"
        " fast is beside the teacher in the same form, and beside the teacher's ONNX file for INT8.",
    )
    if not sizes.rows:
        how = ("Not measured.",)
    return Table("table2", TITLES[2], tuple(columns), tuple(made), (*how, *sizes.notes, *NOTES[2], *slips(2)))


def _size_row(row: Size, above: Mapping[str, Size], known: Known) -> tuple[Value, ...]:
    beside_form = above.get("onnx" if row.form == "int8" else row.form)
    # Float files are of their own kind: a folder has a tokenizer's files too.
    teacher = next(iter(above.values()), None)
    left = [retention(row.scores.get(task), teacher.scores.get(task)) if teacher else None for task in known.tasks]
    whole = [value for value in left if value is not None]
    return (
        known.setups[row.setup].words,
        FORMS[row.form],
        single(row.bytes),
        single(row.bytes / beside_form.bytes if beside_form else None),
        single(row.compressed_bytes),
        single(row.parameters),
        single(row.flops),
        single(row.peak_bytes),
        single(1e3 * row.median),
        single(1e3 * row.p95),
        single(beside_form.median / row.median if beside_form else None),
        single(mean(whole)) if whole and len(whole) == len(left) else None,
    )


def _single_table(names: Sequence[str], known: Known) -> Table:
    """Return a row for each task: its teacher and student beside those of all tasks."""
    columns = [Column("task", "task", "words")]
    for words, key in (("one task", "single"), ("all tasks", "multi")):
        columns += [
            Column(f"{words}: teacher", f"{key}_teacher"),
            Column(f"{words}: {known.shapes.large}", f"{key}_student"),
            Column(f"{words}: %", f"{key}_retention", "percent"),
        ]
    made = []
    for task in (task for task in known.tasks if any(name.startswith(f"single-{task}") for name in names)):
        values: list[Value] = [f"{task} {known.metrics[task]}"]
        pairs = ((f"single-{task}", f"single-{task}-{known.shapes.large}"), (TEACHER, large_name(known.shapes)))
        for teacher, student in pairs:
            for name in (teacher, student):
                values.append(over_seeds(known.results, name, lambda one, task=task: one.scores.get(task)))  # type: ignore[misc]
            values.append(_retention_of(known.results, student, teacher, [task]))
        made.append(tuple(values))
    return Table("table7", TITLES[7], tuple(columns), tuple(made), NOTES[7])


def make_figures(rows: Mapping[int, Sequence[str]], known: Known, sizes: Sizes) -> Figures:
    """Return the figures, as far as cells are finished."""
    drawn: Figures = {}
    series = _series(rows, known)
    if series:
        title = "What is left of the teacher's score, by task"
        drawn["retention"] = (title, _retention(title, series, known.tasks))
    variants = [_variant(row, known) for row in sizes.rows]
    above = next((one for one in variants if one.variant.name == TEACHER), None)
    teacher = Teacher(TEACHER, above.main_scores) if above else None
    picture = variants_plot(variants, LOAD, teacher) if variants else Html()
    if picture:
        drawn["size-latency-accuracy"] = ("Size, latency and what is left of the scores", picture)
    return drawn


def _variant(row: Size, known: Known) -> Measured:
    """Return what was measured, with the scores of the model's cell."""
    from fedmtl_studies.computing import Scores

    named = row.setup if row.form == "fedmtl" else f"{row.setup}/{row.form}"
    variant = Variant(named, Path(), "fedmtl" if row.form == "fedmtl" else "onnx")
    timing = Timing(LOAD.threads[0], row.median, row.p95, row.per_second)
    scores = {
        task: Scores({known.metrics[task]: value}, {}, None, None, 0)
        for task, value in row.scores.items()
        if task in known.metrics
    }
    return Measured(
        variant, row.bytes, row.compressed_bytes, row.parameters, row.flops, row.peak_bytes, (timing,), scores,
        dict(known.metrics),
    )  # fmt: skip


def _series(rows: Mapping[int, Sequence[str]], known: Known) -> dict[str, dict[str, float]]:
    """Return what is left of each score for the best student of each shape, for labels alone, and for the slides."""
    large, small = str(known.shapes.large), str(known.shapes.small)
    students = [name for names in rows.values() for name in names if name != TEACHER]
    kinds = {
        f"best {large}": [name for name in students if name.startswith(f"{large}-") and _is_compared(name)],
        f"best {small}": [name for name in students if name.startswith(f"{small}-")],
        f"{large}, labels alone": [name for name in students if name == f"{large}-labels-long"],
    }
    found = {words: _left(best, known) for words, names in kinds.items() if (best := _best(names, known))}
    theirs = {task: retention(SLIDES.student.get(task), SLIDES.teacher.get(task)) for task in known.tasks}
    shown = {task: left for task, left in theirs.items() if left is not None}
    return {**found, "slides": shown} if found and shown else found


def _is_compared(name: str) -> bool:
    return name.removesuffix(AUGMENTED).endswith(("-teacher", "-random"))


def _best(names: Sequence[str], known: Known) -> str | None:
    """Return the setup with the best mean retention, over the tasks on which the teacher has any score to lose."""
    left = {name: list(_left(name, known).values()) for name in dict.fromkeys(names)}
    return max((name for name in left if left[name]), key=lambda name: (mean(left[name]), name), default=None)


def _left(name: str, known: Known) -> dict[str, float]:
    found = {
        task: beside(known.results, name, TEACHER, lambda one, over, task=task: retained(one, over, [task]))  # type: ignore[misc]
        for task in known.tasks
    }
    return {task: left.mean for task, left in found.items() if left is not None}


def _retention(title: str, series: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> Html:
    wide = 0.8 / len(series)
    bars = [
        Bar(
            at + 0.1 + n * wide,
            at + 0.1 + (n + 0.9) * wide,
            ((left[task], f"class{n}"),),
            f"{name}: {percent(left[task])}",
        )
        for at, task in enumerate(tasks)
        for n, (name, left) in enumerate(series.items())
        if task in left
    ]
    frame = Frame((0, len(tasks)), bar_range(bars), width=max(420, 90 * len(tasks) + 60), height=280, bottom=58)
    names = (
        tag("text", task, class_="x", x=frame.across(at + 0.5), y=frame.floor + 14) for at, task in enumerate(tasks)
    )
    legend = (
        tag(
            "text",
            name,
            class_=f"named class{n}",
            x=frame.left + n * (frame.width - 60) / len(series),
            y=frame.height - 10,
        )
        for n, name in enumerate(series)
    )
    words = "; ".join(
        f"{name}: {', '.join(f'{task} {percent(value)}' for task, value in left.items())}"
        for name, left in series.items()
    )
    return bar_chart(
        frame, bars, title=title, description=words, axis=join((*names, *legend)), label=lambda value: f"{value:.0%}"
    )
