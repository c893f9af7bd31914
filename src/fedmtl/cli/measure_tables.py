"""What `fedmtl measure` shows: tables that fit eighty columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fedmtl.cli.tables import amount, number
from fedmtl.compress.measure.measured import Load, Measured, Teacher, mean, retentions
from fedmtl.report.variants import large


def scores_table(measured: Sequence[Measured], teacher: Teacher | None) -> Table:
    """Every task's main metric, and below it the share of the teacher's."""
    tasks = list(dict.fromkeys(task for one in measured for task in one.main))
    against = f", below it the share of {teacher.name}'s" if teacher else ""
    table = _table(f"score{against}", [*tasks, "mean"])
    for one in measured:
        scores, kept = one.main_scores, retentions(one, teacher) if teacher else {}
        top = [number(scores.get(task)) for task in tasks]
        table.add_row(one.variant.name, *top, number(mean(scores)), end_section=not kept)
        if kept:
            shares = [_share(kept.get(task)) for task in tasks]
            table.add_row("", *shares, _share(mean(kept)), style="dim", end_section=True)
    return table


def times_table(measured: Sequence[Measured], load: Load) -> Table:
    """Latency and throughput for each number of threads."""
    title = f"one pass of {load.batch} x {load.length} tokens, on the CPU"
    table = _table(title, ["threads", "median ms", "p95 ms", "examples/s", "speed-up"])
    first = measured[0].timings
    for place in range(len(first)):
        for one in measured:
            own = one.timings[place]
            table.add_row(
                one.variant.name,
                str(own.threads),
                _milliseconds(own.median),
                _milliseconds(own.p95),
                f"{own.per_second:,.1f}",
                f"{first[place].median / own.median:.2f}x",
                end_section=one is measured[-1],
            )
    return table


def costs_table(measured: Sequence[Measured]) -> Table:
    """What is shipped, computed and held in memory."""
    table = _table("size, operations of one example, memory", ["size", "zlib", "params", "FLOPs", "peak"])
    for one in measured:
        table.add_row(
            one.variant.name,
            amount(one.bytes),
            amount(one.compressed_bytes),
            large(one.parameters),
            large(one.flops),
            "–" if one.peak_bytes is None else amount(one.peak_bytes),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    # Names give way first: they still read when they are folded.
    table.add_column("variant", overflow="fold", min_width=10)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
