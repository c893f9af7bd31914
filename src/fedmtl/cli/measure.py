"""fedmtl measure"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import complete_run
from fedmtl.cli.stages import make_stages
from fedmtl.cli.terminal import show, write
from fedmtl.compress.measure.measured import Load, Variant, remarks
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
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to; otherwise `measure` in the first run's folder.")
    ] = None,
) -> None:
    """Measure on this machine's CPU what models cost (size, work, time, memory) and what they score."""
    load = Load(batch, length, _threads(threads))
    from fedmtl.cli.measure_tables import costs_table, scores_table, times_table
    from fedmtl.compress.measure.machine import machine
    from fedmtl.experiment.measure import measure, teacher_of, variants_of
    from fedmtl.report.variants import write_measures

    # A file may be named beside its run.
    variants = list({variant.path.resolve(): variant for given in runs for variant in variants_of(given)}.values())
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
    from fedmtl.experiment.onnx_inference import run_of

    try:
        return run_of(first.path).path / "measure"
    except FedmtlError:
        return first.path.parent / "measure"
