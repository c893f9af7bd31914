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
from fedmtl.predict.onnx import require, run_of
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

# A stage, the share of it that is done, and what is to be said.
Watch = Callable[[str, float, str], None]


def variants_of(given: str | Path, round: Round | None = None) -> list[Variant]:
    """Of a run, itself and the ONNX files in its export/; of a file, that file alone; with a round, only that."""
    if str(given).endswith(".onnx"):
        file = Path(given)
        if not file.is_file():
            raise ModelError(f"{file}: no such file; write it with `fedmtl export RUN --to onnx`")
        return [Variant(_file_name(file), file, "onnx")]
    run = find_run(str(given))
    if not (run.model / "tasks.json").is_file():
        raise ModelError(f"{run.path}: holds no finished model; let the run end, or go on with `fedmtl run --resume`")
    if round is not None:
        return [Variant(f"{run.name}@{round}", run.path, "fedmtl", run_at(run, round).model)]
    # The float file first: its name is the shortest.
    files = sorted((run.path / "export").glob("*.onnx"), key=lambda file: (len(file.name), file.name))
    return [Variant(run.name, run.path, "fedmtl"), *(Variant(_file_name(file), file, "onnx") for file in files)]


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
    """RUN/onnx for the file that `export` wrote, RUN/SCHEME for `quantize`'s; elsewhere the file's name."""
    if file.parent.name != "export":
        return file.name
    kind = file.stem.removeprefix(EXPORTED).removeprefix(".") or "onnx"
    return f"{file.resolve().parent.parent.name}/{kind}"


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
