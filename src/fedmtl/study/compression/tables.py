"""The tables of the study of compression, with the slides' and the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from fedmtl.study.compression.cells import TEACHER, Setup, Shapes, large_name
from fedmtl.study.compression.report import NOTES, PAPER, SIZES, SLIDES, Printed, slips
from fedmtl.study.compression.results import Measure, Result, Results, beside, over_seeds, retained, retention
from fedmtl.study.compression.sizes import Size, Sizes
from fedmtl.study.measures import Spread
from fedmtl.study.tables import Column, Table, Value

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


def make_table(number: int, names: Sequence[str], known: Known, sizes: Sizes) -> Table:
    """One table; a row without its cells is there, empty."""
    if number == 2:
        return _size_table(known, sizes)
    if number == 7:
        return _single_table(names, known)
    extra = _extra_columns(number)
    columns = [
        Column("model", "model", "words"), Column("setup", "setup", "words"),
        *_score_columns(known), Column("mean of %", "mean_retention", "percent"), Column(MARKED, "marked", "words"),
        *(column for column, _ in extra), Column("device", "device", "words"),
    ]  # fmt: skip
    made = [_row(name, known, [measure for _, measure in extra]) for name in names]
    if number == 1:
        made += [row for printed in (SLIDES, PAPER) for row in _printed_rows(printed, known, len(columns))]
    notes = (*NOTES.get(number, ()), *slips(number), *_shared(names, known.results))
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
        values.append(None if name == TEACHER else _left(results, name, TEACHER, [task]))
    values.append(None if name == TEACHER else _left(results, name, TEACHER, known.tasks))
    values.append(marked_words(cells))
    values += [over_seeds(results, name, measure) for measure in extra]
    return (*values, cells[0].device if cells and cells[0] else None)


def _left(results: Results, name: str, teacher: str, tasks: Sequence[str]) -> Spread | None:
    return beside(results, name, teacher, lambda one, over: retained(one, over, tasks))


def marked_words(cells: Sequence[Result | None]) -> str | None:
    """The tasks on which a model answers no better than a constant, in any seed."""
    return ", ".join(dict.fromkeys(task for cell in cells if cell is not None for task in cell.marked)) or None


def _printed_rows(printed: Printed, known: Known, width: int) -> list[tuple[Value, ...]]:
    """The teacher's and the student's row; retention is recomputed from their scores."""
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
            values += [_plain(scores.get(task)), _plain(left)]
        made.append((*values, *(None,) * (width - len(values))))
    return made


def _plain(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, None, 1)


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
            row.words, "ONNX" if "Q" in row.words else None, _plain(row.megabytes * 1e6),
            _plain(row.megabytes / whole.megabytes), None, None, None, None, _plain(row.milliseconds), None,
            _plain(whole.milliseconds / row.milliseconds), None,
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
        _plain(row.bytes),
        _plain(row.bytes / beside_form.bytes if beside_form else None),
        _plain(row.compressed_bytes),
        _plain(row.parameters),
        _plain(row.flops),
        _plain(row.peak_bytes),
        _plain(1e3 * row.median),
        _plain(1e3 * row.p95),
        _plain(beside_form.median / row.median if beside_form else None),
        _plain(mean(whole)) if whole and len(whole) == len(left) else None,
    )


def _single_table(names: Sequence[str], known: Known) -> Table:
    """A row for each task: its own teacher and student beside those of all tasks."""
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
            values.append(_left(known.results, student, teacher, [task]))
        made.append(tuple(values))
    return Table("table7", TITLES[7], tuple(columns), tuple(made), NOTES[7])


def _shared(names: Sequence[str], results: Results) -> list[str]:
    cells = [one for name in names for one in results.get(name, {}).values() if one is not None]
    most = max((one.cells_at_once for one in cells), default=1)
    return [f"Seconds were taken with up to {most} cells at once on the machine."] if most > 1 else []
