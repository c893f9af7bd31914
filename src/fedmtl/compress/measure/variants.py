"""What variants of a model cost and are worth, measured on this machine's CPU.

Each variant has a process, and all of them are there at once: they make a block of passes in rotation
while the others wait, so that what else the machine does slows all alike. Memory is read before anything but timing was
done, with the first number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedmtl.compress.measure.costs import compressed_bytes, disk_bytes, interleave, timing
from fedmtl.compress.measure.measured import Load, Measured, Teacher, Timing, Variant
from fedmtl.compress.measure.process import Measuring, Scored, start_measuring
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.predict.onnx import GRAPH, require, run_of
from fedmtl.predict.rounds import run_at
from fedmtl.runs.event_lines import first_of
from fedmtl.runs.events import DistillEvent
from fedmtl.runs.folder import RunFolder, find_run
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import Round

__all__ = ["Load", "Measured", "Teacher", "Timing", "Variant", "measure", "teacher_of", "variants_of"]

REPEATS = 100
# As `fedmtl export` names its file; those that `quantize` makes of it have the scheme behind.
EXPORTED = "model"
# The folder in export/ that it writes; one of a round has the round behind.
BUNDLE = "onnx"

# A stage, the share of it that is done, and what is to be said.
Watch = Callable[[str, float, str], None]


def variants_of(given: str | Path, round: Round | None = None) -> list[Variant]:
    """Of a run, itself and the ONNX files in its export/; of a file, that file alone; with a round, only that."""
    is_file = str(given).endswith(".onnx")
    file = Path(given) if is_file else Path(given) / GRAPH
    if is_file and not file.is_file():
        raise ModelError(f"{file}: no such file; write it with `fedmtl export RUN --to onnx`")
    if file.is_file():
        return [Variant(_file_name(file), file, "onnx")]
    run = find_run(str(given))
    if not (run.model / "tasks.json").is_file():
        raise ModelError(f"{run.path}: holds no finished model; let the run end, or go on with `fedmtl run --resume`")
    if round is not None:
        return [Variant(f"{run.name}@{round}", run.path, "fedmtl", run_at(run, round).model)]
    # Earlier versions wrote into export/ itself; a bundle's file goes before one of theirs that has its name.
    found = [*(run.path / "export").glob("*.onnx"), *(run.path / "export").glob("onnx*/*.onnx")]
    files = {_file_name(file): file for file in found}
    # The float file first: its name is the shortest.
    ordered = sorted(files.items(), key=lambda item: (len(item[1].name), item[0]))
    return [Variant(run.name, run.path, "fedmtl"), *(Variant(name, file, "onnx") for name, file in ordered)]


def measure(
    variants: Sequence[Variant],
    load: Load,
    *,
    scores: bool = True,
    repeats: int = REPEATS,
    watch: Watch = lambda stage, share, words: None,
) -> list[Measured]:
    """Measure all of them side by side, in the order given; names must differ, and memory must hold all at once."""
    names = [variant.name for variant in variants]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise FedmtlError(f"{doubled}: there are two variants of this name; name each once")
    files = [variant.path for variant in variants if variant.form == "onnx"]
    if files:
        require("measure", "onnx", "onnxruntime")
    for file in files if scores else ():
        _check_data(file)
    measuring: list[Measuring] = []
    try:
        measuring += (start_measuring(variant, load) for variant in variants)
        timings, peaks = _time(measuring, load, repeats, watch)
        stage = "scoring" if scores else "counting"
        return [
            _gather(one, timings[index], peaks[index], scores, partial(watch, stage, index / len(measuring)))
            for index, one in enumerate(measuring)
        ]
    finally:
        for one in measuring:
            one.end()


def teacher_of(measured: Sequence[Measured], name: str | None = None) -> Teacher | None:
    """The variant named; else the teacher that the first one's run was distilled from; else the first one."""
    if not measured or measured[0].scores is None:
        return None
    if name is not None:
        found = next((one for one in measured if one.variant.name == name), None)
        if found is None:
            known = ", ".join(one.variant.name for one in measured)
            raise FedmtlError(f"--teacher {name}: is not measured; it is one of {known}")
        return Teacher(name, found.main_scores)
    recorded = _recorded_teacher(measured[0].variant)
    return recorded or Teacher(measured[0].variant.name, measured[0].main_scores)


def _recorded_teacher(variant: Variant) -> Teacher | None:
    run = RunFolder(variant.path) if variant.form == "fedmtl" else run_of(variant.path)
    known = first_of(read_events(run), DistillEvent)
    return None if known is None else Teacher(known.teacher, known.teacher_metrics)


def _file_name(file: Path) -> str:
    """RUN/onnx for the file that `export` wrote, RUN/SCHEME for `quantize`'s; elsewhere the file's name.

    Those of a round's bundle, such as export/onnx-best, are RUN/best and RUN/best.SCHEME.
    """
    folder = file.resolve().parent
    is_bundle = folder.parent.name == "export" and folder.name.startswith(BUNDLE)
    if not is_bundle and folder.name != "export":
        return file.name
    run = folder.parents[1] if is_bundle else folder.parent
    round_name = folder.name.removeprefix(BUNDLE).removeprefix("-") if is_bundle else ""
    kind = ".".join(filter(None, (round_name, file.stem.removeprefix(EXPORTED).removeprefix("."))))
    return f"{run.name}/{kind or 'onnx'}"


def _check_data(file: Path) -> None:
    try:
        run_of(file)
    except FedmtlError:
        raise FedmtlError(
            f"{file}: lies in no run's folder, which would name its data; measure it with --no-scores"
        ) from None


def _time(
    measuring: Sequence[Measuring], load: Load, repeats: int, watch: Watch
) -> tuple[list[tuple[Timing, ...]], list[int | None]]:
    """Every variant's timings, one for each number of threads, and its peak memory."""
    timings: list[tuple[Timing, ...]] = [() for _ in measuring]
    peaks: list[int | None] = []
    for threads in load.threads:
        stage = f"timing, {threads} {'thread' if threads == 1 else 'threads'}"
        for index, one in enumerate(measuring):
            watch(stage, 0, f"opening {one.variant.name} ({index + 1} of {len(measuring)})")
            one.ask("open", threads)
        seconds: list[list[float]] = []
        for seconds in interleave([partial(one.ask, "time") for one in measuring], repeats):
            watch(stage, len(seconds[0]) / repeats, f"{len(seconds[0])} of {repeats} passes each")
        timings = [
            (*before, timing(threads, passes, load.batch, one.ask("waiting")))
            for before, passes, one in zip(timings, seconds, measuring, strict=True)
        ]
        peaks = peaks or [one.ask("peak") for one in measuring]
    return timings, peaks


def _gather(
    one: Measuring, timings: tuple[Timing, ...], peak: int | None, scores: bool, watch: Callable[[str], None]
) -> Measured:
    variant = one.variant
    watch(variant.name)
    scored: Scored | None = None
    if scores:
        # All cores: nobody is timed any more.
        one.ask("open", None)
        scored = one.ask("score")
    parameters, flops = one.ask("facts")
    shipped = RunFolder(variant.path, variant.model).model if variant.form == "fedmtl" else variant.path
    return Measured(
        variant,
        disk_bytes(shipped),
        compressed_bytes(shipped),
        parameters,
        flops,
        peak,
        timings,
        scored.scores if scored else None,
        scored.main if scored else {},
        scored.floors if scored else {},
    )
