"""What variants cost and are worth as files: a page that opens offline, a table for programs, and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fedmtl.compress.measure.measured import Load, Measured, Teacher, mean, remarks, retentions
from fedmtl.report.formats import MISSING, count, percent, score, size
from fedmtl.report.markup import Html, join, notes, table, tag
from fedmtl.report.single_page import TABLE_STYLE, single_page, write_svg
from fedmtl.report.variants_plot import PLOT_STYLE, variants_plot
from fedmtl.runs.folder import write_atomic

GUIDE = (
    "Size is what has to be shipped: a run's model folder, or the ONNX file; compressed is zlib at level 6.",
    "Operations are those of matrix products for one example, a multiplication and an addition counted as two; a pooler"
    " is in them where a head reads it.",
    "Times are of a pass with made-up tokens without padding, on the CPU, for the first task that reads one sequence;"
    " the variants alternate. Tokenizing is not in them.",
    "Memory is the most that the process had in use while it loaded and was timed, Python and libraries with it.",
)


def write_measures(
    folder: Path, measured: Sequence[Measured], load: Load, teacher: Teacher | None, machine: str
) -> list[Path]:
    """Write measure.csv, measure.html and, where there are scores, measure.svg; never half of one."""
    written = [folder / "measure.csv", folder / "measure.html"]
    write_atomic(written[0], csv_text(measured, load, teacher).encode())
    picture = variants_plot(measured, load, teacher)
    write_atomic(written[1], _page(measured, load, teacher, machine, picture).encode("utf-8", "replace"))
    if picture:
        written.append(folder / "measure.svg")
        write_svg(written[2], picture, PLOT_STYLE)
    return written


def csv_text(measured: Sequence[Measured], load: Load, teacher: Teacher | None) -> str:
    """A row for every variant and number of threads, with all metrics; what is undefined is empty."""
    rows = [_record(one, index, load, teacher) for one in measured for index in range(len(one.timings))]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _record(one: Measured, index: int, load: Load, teacher: Teacher | None) -> dict[str, object]:
    timing = one.timings[index]
    record: dict[str, object] = {
        "variant": one.variant.name,
        "form": one.variant.form,
        "bytes": one.bytes,
        "compressed_bytes": one.compressed_bytes,
        "parameters": one.parameters,
        "flops": one.flops,
        "peak_bytes": one.peak_bytes,
        "batch": load.batch,
        "length": load.length,
        "threads": timing.threads,
        "median_seconds": timing.median,
        "p95_seconds": timing.p95,
        "examples_per_second": timing.per_second,
        "waiting": timing.waiting,
    }
    retained = retentions(one, teacher) if teacher else {}
    if retained:
        record["mean_retention"] = mean(retained)
    for task, scores in (one.scores or {}).items():
        record |= {f"{task}.{metric}": value for metric, value in scores.metrics.items()}
        record[f"{task}.majority"] = one.floors[task]
        if teacher:
            record[f"{task}.retention"] = retained[task]
    return record


def _page(measured: Sequence[Measured], load: Load, teacher: Teacher | None, machine: str, picture: Html) -> str:
    title = f"{measured[0].variant.name}: size, latency, accuracy"
    parts = [tag("h1", "What each variant costs and is worth"), tag("p", f"Measured on {machine}.", class_="guide")]
    if picture:
        parts.append(tag("figure", picture, class_="wide", style="max-width: 54rem"))
    parts.append(notes(remarks(measured, teacher)))
    if measured[0].scores is not None:
        parts.append(tag("section", tag("h2", "Scores"), _scores(measured, teacher)))
    parts.append(tag("section", tag("h2", "Time"), _times(measured, load)))
    parts.append(tag("section", tag("h2", "Size and work"), _costs(measured), notes(GUIDE)))
    return single_page(title, *parts, style=TABLE_STYLE + PLOT_STYLE, class_="broad")


def _scores(measured: Sequence[Measured], teacher: Teacher | None) -> Html:
    tasks = list(dict.fromkeys(task for one in measured for task in one.main))
    main = {task: metric for one in reversed(measured) for task, metric in one.main.items()}
    rows = []
    for one in measured:
        retained = retentions(one, teacher) if teacher else {}
        cells = [_scored(one.main_scores.get(task), retained.get(task)) for task in tasks]
        rows.append((one.variant.name, *cells, _scored(mean(one.main_scores), mean(retained))))
    floors = {task: floor for one in reversed(measured) for task, floor in one.floors.items()}
    rows.append((tag("em", "the majority class"), *(score(floors[task]) for task in tasks), ""))
    against = f", and the share of {teacher.name}'s that is left" if teacher else ""
    head = ("variant", *(join((task, " ", tag("small", main[task]))) for task in tasks), "mean")
    return table(f"Each task's main metric on the validation data{against}", head, rows, class_="study")


def _scored(value: float | None, retained: float | None) -> Html:
    share = join((" ", tag("small", percent(retained)))) if retained is not None else Html()
    return join((score(value), share))


def _times(measured: Sequence[Measured], load: Load) -> Html:
    first = measured[0].timings
    rows = [
        (
            one.variant.name,
            timing.threads,
            f"{1e3 * timing.median:.3g} ms",
            f"{1e3 * timing.p95:.3g} ms",
            f"{timing.per_second:,.3g}" if timing.per_second < 1000 else count(timing.per_second),
            f"{first[index].median / timing.median:.2f}x",
        )
        for index in range(len(first))
        for one in measured
        for timing in (one.timings[index],)
    ]
    head = ("variant", "threads", "median", "95th percentile", "examples a second", "times as fast")
    return table(
        f"One pass of {load.batch} x {load.length} tokens, and how many times as fast as the first",
        head,
        rows,
        class_="study",
    )


def _costs(measured: Sequence[Measured]) -> Html:
    first = measured[0]
    rows = [
        (
            one.variant.name,
            size(one.bytes),
            percent(one.bytes / first.bytes),
            size(one.compressed_bytes),
            count(one.parameters),
            large(one.flops),
            size(one.peak_bytes),
        )
        for one in measured
    ]
    head = ("variant", "size", "of the first's", "compressed", "parameters", "operations", "peak memory")
    return table("What is shipped and what one example takes", head, rows, class_="study")


def large(value: int | None) -> str:
    """2869200384 -> 2.87 G"""
    if value is None:
        return MISSING
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return str(value)
