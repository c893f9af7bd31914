"""Numbers and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedmtl.run_summary import RunSummary, summarize

Event = Mapping[str, Any]


def number(value: float | None) -> str:
    """Three decimals, or a dash for what is undefined."""
    return "–" if value is None else f"{value:.3f}"


def amount(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def results_table(events: Sequence[Event], name: str) -> Table:
    """Every task's metrics before and after."""
    summary = summarize(events, name)
    synthetic = ", synthetic data" if summary.synthetic else ""
    table = Table(
        title=f"{name}: {summary.rounds} rounds in {duration(summary.seconds)}{synthetic}",
        title_justify="left",
    )
    for column, justify in (
        ("task", "left"),
        ("metric", "left"),
        ("before", "right"),
        ("best", "right"),
        ("after", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for task, own in summary.tasks.items():
        for position, metric in enumerate(own.final):
            best = own.best.get(metric)
            at_best = f"{number(best.value)} @{best.round}" if best else "–"
            marked = f" ({own.marked})" if own.marked and metric == own.metric else ""
            values = [number(own.start.get(metric)), at_best, number(own.final[metric]) + marked]
            name_cell = task if position == 0 else ""
            main = "bold" if metric == own.metric else ""
            table.add_row(name_cell, metric, *values, style=main, end_section=metric == list(own.final)[-1])
    return table


def comparison_table(summaries: Sequence[RunSummary]) -> Table:
    """Runs side by side; differences are to the first one."""
    table = Table(title="differences are to the first run", title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.name, justify="right")
    for label, values in comparison_rows(summaries):
        table.add_row(label, *values)
    return table


def comparison_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    first = summaries[0]
    rows: list[tuple[str, list[str]]] = [("mode", [s.mode for s in summaries])]
    metrics = {
        (task, metric): None for summary in summaries for task, own in summary.tasks.items() for metric in own.final
    }
    for task, metric in metrics:
        values = [s.tasks[task].final.get(metric) if task in s.tasks else None for s in summaries]
        rows.append((f"{task} {metric}", _with_differences(values)))
    rows.append(("overall", _with_differences([s.overall for s in summaries])))
    rows.append(("classification", _with_differences([s.classification for s in summaries])))
    rows.append(("parameters", [_ratio(s.parameters, first.parameters, f"{s.parameters or 0:,}") for s in summaries]))
    rows.append(("bytes up", [_ratio(s.bytes_up, first.bytes_up, amount(s.bytes_up)) for s in summaries]))
    rows.append(("bytes down", [_ratio(s.bytes_down, first.bytes_down, amount(s.bytes_down)) for s in summaries]))
    rows.append(("rounds", [str(s.rounds) for s in summaries]))
    rows.append(("seconds", [f"{s.seconds:.1f}" for s in summaries]))
    rows.append(("failures", [str(len(s.failures)) for s in summaries]))
    return rows


def _with_differences(values: Sequence[float | None]) -> list[str]:
    base = values[0]
    cells = [number(base)]
    for value in values[1:]:
        difference = f" ({value - base:+.3f})" if value is not None and base is not None else ""
        cells.append(number(value) + difference)
    return cells


def _ratio(value: int | None, base: int | None, text: str) -> str:
    return f"{text} ({value / base:.2f}x)" if value and base and value != base else text
