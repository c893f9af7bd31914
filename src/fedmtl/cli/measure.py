"""fedmtl measure: what models cost on this machine and what they score, in tables that fit eighty columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedmtl.cli.arguments import Round, complete_run, onnx_path
from fedmtl.cli.tables import amount, number
from fedmtl.cli.terminal import make_stages, show, write
from fedmtl.compress.measure.measured import Load, Measured, Teacher, Variant, mean, remarks, retentions
from fedmtl.errors import FedmtlError

DEFAULTS = Load()


def measure(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Names or folders of runs, each with the ONNX files in its export/, or single ONNX files.",
            autocompletion=complete_run,
            metavar="RUN...",
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Examples in a pass.")] = DEFAULTS.batch,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = DEFAULTS.length,
    threads: Annotated[str, typer.Option(help="Numbers of threads, each timed by itself.", metavar="N,...")] = ",".join(
        map(str, DEFAULTS.threads)
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Passes that are timed, for each number of threads.")] = 100,
    no_scores: Annotated[bool, typer.Option("--no-scores", help="Size and time only: no data is read.")] = False,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The variant that retention is against; otherwise the recorded teacher of a distilled first run, or"
            " the first variant.",
            metavar="NAME",
        ),
    ] = None,
    round: Round = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to; otherwise `measure` in the first run's folder.")
    ] = None,
) -> None:
    """Measure on this machine's CPU what models cost (size, work, time, memory) and what they score."""
    load = Load(batch, length, _threads(threads))
    from fedmtl.compress.measure.costs import machine
    from fedmtl.compress.measure.variants import measure, teacher_of, variants_of
    from fedmtl.report.variants import write_measures

    # A file may be named beside its run.
    found = [variant for given in runs for variant in variants_of(given, None if onnx_path(given) else round)]
    variants = list({variant.path.resolve(): variant for variant in found}.values())
    if teacher is not None:
        _check_teacher(teacher, variants, no_scores)
    with make_stages() as shown:
        measured = measure(variants, load, scores=not no_scores, repeats=repeats, watch=shown.show)
    against = teacher_of(measured, teacher)
    written = write_measures(out or _folder(variants[0]), measured, load, against, machine())
    if not no_scores:
        show(scores_table(measured, against))
    show(times_table(measured, load))
    show(costs_table(measured), [*remarks(measured, against), *_too_many(load)])
    write(f"written: {', '.join(map(str, written))}")


def _threads(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise FedmtlError(f"--threads {text}: is not a list of numbers; write such as 1,2")
    return tuple(dict.fromkeys(map(int, parts)))


def _too_many(load: Load) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    return [f"{many} threads are more than this machine's {cores} cores" for many in load.threads if many > cores]


def _check_teacher(name: str, variants: list[Variant], no_scores: bool) -> None:
    if no_scores:
        raise FedmtlError(f"--teacher {name}: there are no scores to compare with --no-scores; leave one of them out")
    names = [variant.name for variant in variants]
    if name not in names:
        raise FedmtlError(f"--teacher {name}: is not measured; it is one of {', '.join(names)}")


def _folder(first: Variant) -> Path:
    if first.form == "fedmtl":
        return first.path / "measure"
    from fedmtl.predict.onnx import run_of

    try:
        return run_of(first.path).path / "measure"
    except FedmtlError:
        return first.path.parent / "measure"


def scores_table(measured: Sequence[Measured], teacher: Teacher | None) -> Table:
    """Every task's main metric, and below it the share of the teacher's."""
    tasks = list(dict.fromkeys(task for one in measured for task in one.main))
    against = f", below it the share of {teacher.name}'s" if teacher else ""
    table = _table(f"score{against}", [*tasks, "mean"])
    for one in measured:
        scores, retained = one.main_scores, retentions(one, teacher) if teacher else {}
        top = [number(scores.get(task)) for task in tasks]
        table.add_row(one.variant.name, *top, number(mean(scores)), end_section=not retained)
        if retained:
            shares = [_share(retained.get(task)) for task in tasks]
            table.add_row("", *shares, _share(mean(retained)), style="dim", end_section=True)
    return table


def times_table(measured: Sequence[Measured], load: Load) -> Table:
    """Latency and throughput for each number of threads."""
    title = f"one pass of {load.batch} x {load.length} tokens, on the CPU"
    table = _table(title, ["threads", "median ms", "p95 ms", "examples/s", "speed-up"])
    first = measured[0].timings
    for index in range(len(first)):
        for one in measured:
            timing = one.timings[index]
            table.add_row(
                one.variant.name,
                str(timing.threads),
                _milliseconds(timing.median),
                _milliseconds(timing.p95),
                f"{timing.per_second:,.1f}",
                f"{first[index].median / timing.median:.2f}x",
                end_section=one is measured[-1],
            )
    return table


def costs_table(measured: Sequence[Measured]) -> Table:
    """What is shipped and computed, and the memory it takes."""
    from fedmtl.report.variants import large

    table = _table("size, operations of one example, memory", ["size", "of first", "zlib", "params", "FLOPs", "peak"])
    for one in measured:
        table.add_row(
            one.variant.name,
            amount(one.bytes),
            _share(one.bytes / measured[0].bytes),
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
