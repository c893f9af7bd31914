"""The study of compression: what a cell came to, what models cost on this machine, and the published numbers.

Sizes and latencies are measured when every cell has ended, so that nothing else runs, in float and in INT8. They are
stored, and measured again only where a model is another one. INT8 files are scored on the validation examples; float
ones compute what their cell does.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmtl_studies.folder import StudyFolder, read_record
from fedmtl_studies.library import (
    Config,
    DataEvent,
    EndEvent,
    EvaluationEvent,
    Load,
    Measured,
    PlanEvent,
    PruningEvent,
    RoundEvent,
    RunFolder,
    StartEvent,
    Variant,
    last_of,
    read_events,
    write_atomic,
)
from fedmtl_studies.results import main_metrics, recorded

if TYPE_CHECKING:
    from fedmtl_studies.computing import TaskData

LOAD = Load(batch=1, length=128, threads=(1,))
NO_ONNX = "onnx, onnxscript or onnxruntime is not installed here: rows of ONNX files are left out."
# Of each task; half of them give ranges.
CALIBRATION = 128
# A ratio of numbers with three digits is within this of what is printed with a decimal of a percent.
ROUNDING = 0.0011

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """A finished cell: each task's main metric after the last pass, what it cost, and how sparse it is.

    `marked` has the tasks on which it does no better than a constant answer, with how. `zeros` are the shares of zeros
    in linear layers and in all weights, where it was pruned by magnitude.
    """

    cell: str
    scores: Mapping[str, float | None]
    metrics: Mapping[str, Mapping[str, float | None]]
    marked: Mapping[str, str]
    parameters: int
    model_bytes: int | None
    examples: int
    copies: int
    seconds: float
    device: str
    cells_at_once: int
    weights_sha256: str
    zeros: tuple[float, float] | None = None


def read_result(run: RunFolder) -> Result:
    """Read the result of a finished run: an ordinary one or a distillation."""
    events = read_events(run)
    # A run that was resumed has several starts.
    start = recorded(run, "its start", last_of(events, StartEvent))
    plan = recorded(run, "its plan", last_of(events, PlanEvent))
    end = recorded(run, "its end", last_of(events, EndEvent))
    last = {event.task: event for event in events if isinstance(event, EvaluationEvent)}
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    record = read_record(run)
    return Result(
        cell=run.name,
        scores={
            task: last[task].metrics.get(metric) if task in last else None
            for task, metric in main_metrics(run, start).items()
        },
        metrics={task: dict(event.metrics) for task, event in last.items()},
        marked={task: event.marked for task, event in last.items() if event.marked},
        parameters=recorded(run, "its parameters", plan.total),
        model_bytes=record.get("model_bytes"),
        examples=sum(event.samples or 0 for event in rounds),
        copies=sum(event.augmented or 0 for event in events if isinstance(event, DataEvent)),
        seconds=math.fsum(recorded(run, "a round's seconds", event.seconds) for event in rounds),
        device=recorded(run, "its device", start.device),
        cells_at_once=record.get("cells_at_once", 1),
        weights_sha256=recorded(run, "its final weights", end.weights_sha256),
        zeros=_zeros(last_of(events, PruningEvent)),
    )


def _zeros(pruned: PruningEvent | None) -> tuple[float, float] | None:
    if pruned is None:
        return None
    return pruned.linear.zeros / pruned.linear.weights, pruned.all.zeros / pruned.all.weights


def retention(score: float | None, teacher: float | None) -> float | None:
    """Return the share of the teacher's score that is left; None where the teacher's is not above 0."""
    return None if score is None or teacher is None or teacher <= 0 else score / teacher


GLUE = ("sst2", "mrpc", "rte", "cola", "qqp", "stsb", "mnli", "qnli")


def glue_average(scores: Mapping[str, float | None], tasks: Iterable[str]) -> float | None:
    """Return the mean of main metrics over those of GLUE's eight that are among `tasks`; None where one is missing."""
    found = [scores.get(task) for task in tasks if task in GLUE]
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(found) > 1 else None


def retained(result: Result, teacher: Result, tasks: Iterable[str]) -> float | None:
    """Return the mean retention over these tasks; None where one has none."""
    found = [retention(result.scores.get(task), teacher.scores.get(task)) for task in tasks]
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class Size:
    """One model in one form; seconds are of one text of the load, `scores` each task's main metric."""

    setup: str
    form: str
    bytes: int
    compressed_bytes: int
    parameters: int | None
    flops: int
    peak_bytes: int | None
    median: float
    p95: float
    per_second: float
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Sizes:
    """All that was measured, and notes on it."""

    rows: tuple[Size, ...] = ()
    notes: tuple[str, ...] = ()


def measure_sizes(
    folder: StudyFolder, runs: Mapping[str, RunFolder], results: Mapping[str, Result], config: Config, say: Say
) -> None:
    """Measure every run as fedmtl computes it, as an ONNX file, and as one in INT8, unless that is known.

    `config` names the data: that of the cells may lie elsewhere, where they were trained.
    """
    can_write = has_onnx()
    key = {"load": [LOAD.batch, LOAD.length, *LOAD.threads], "onnx": can_write, "weights": _weights(results)}
    found = _read_stored(folder)
    if any(found.get(name) != value for name, value in key.items()):
        rows = _measure_all(folder.path / "onnx", runs, results, config if can_write else None, say) if runs else []
        stored = {**key, "rows": [asdict(row) for row in rows]}
        write_atomic(_sizes_path(folder), json.dumps(stored, indent=1).encode())


def has_onnx() -> bool:
    """Say whether ONNX files can be written, quantized and run here."""
    return all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def read_sizes(folder: StudyFolder, results: Mapping[str, Result]) -> Sizes:
    """Return what was measured of these very models."""
    found, weights = _read_stored(folder), _weights(results)
    rows = [row for row in found.get("rows", ()) if weights.get(row["setup"]) == found["weights"][row["setup"]]]
    return Sizes(tuple(Size(**row) for row in rows), () if found.get("onnx", True) else (NO_ONNX,))


def _weights(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.weights_sha256 for name, result in results.items()}


def _sizes_path(folder: StudyFolder) -> Path:
    return folder.path / "sizes.json"


def _read_stored(folder: StudyFolder) -> dict[str, Any]:
    path = _sizes_path(folder)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _measure_all(
    files: Path, runs: Mapping[str, RunFolder], known: Mapping[str, Result], config: Config | None, say: Say
) -> list[Size]:
    """Measure all forms of every run; `config` None is without ONNX files, which alone need data."""
    from fedmtl_studies.computing import measure

    variants: list[tuple[str, str, Variant]] = []
    scores: dict[str, dict[str, float | None]] = {}
    data = {} if config is None else _load_data(config)
    for number, (name, run) in enumerate(runs.items(), start=1):
        forms = {"fedmtl": run.path}
        if config is not None:
            say(f"  ONNX files of {name}, {number} of {len(runs)}")
            forms |= _write_files(files, name, run, data)
        for form, path in forms.items():
            named = name if form == "fedmtl" else f"{name}/{form}"
            variants.append((name, form, Variant(named, path, "fedmtl" if form == "fedmtl" else "onnx")))
            scores[named] = _score(path, data) if form == "int8" else dict(known[name].scores)
    say(f"  timing {len(variants)} models")
    measured = measure([variant for *_, variant in variants], LOAD, scores=False)
    return [
        _size(name, form, one, scores[one.variant.name])
        for (name, form, _), one in zip(variants, measured, strict=True)
    ]


def _load_data(config: Config) -> dict[str, TaskData]:
    from fedmtl_studies.computing import load_tasks

    return load_tasks(config)


def _write_files(folder: Path, name: str, run: RunFolder, data: Mapping[str, Any]) -> dict[str, Path]:
    from fedmtl_studies.computing import (
        OnnxModel,
        Quantization,
        export_onnx,
        feeds,
        load_run,
        needs_reduced_range,
        open_onnx,
        quantize,
    )

    files = {"onnx": folder / f"{name}.onnx", "int8": folder / f"{name}.int8.onnx"}
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_run(run)
    export_onnx(loaded.saved, loaded.bound, files["onnx"])
    model: OnnxModel = open_onnx(files["onnx"])
    given = [feeds(model, model.tasks[task], [row]) for task in model.tasks for row in _texts(data[task].train.texts)]
    quantize(files["onnx"], files["int8"], Quantization(reduce_range=needs_reduced_range()), given)
    return files


def _texts(columns: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return some rows, evenly over the whole."""
    rows = list(zip(*columns, strict=True))
    count = min(CALIBRATION // 2, len(rows))
    return [rows[step * len(rows) // count] for step in range(count)]


def _score(file: Path, data: Mapping[str, Any]) -> dict[str, float | None]:
    from fedmtl_studies.computing import compute, open_onnx, score, sum_predictions

    model = open_onnx(file)
    found: dict[str, float | None] = {}
    for name, task in model.tasks.items():
        examples = data[name].validation
        outputs = compute(model, [name], list(zip(*examples.texts, strict=True)))[name]
        scores = score(task, sum_predictions(task, outputs, examples.labels, 0.0, True))
        found[name] = scores.metrics[task.metric]
    return found


def _size(name: str, form: str, one: Measured, scores: dict[str, float | None]) -> Size:
    first = one.timings[0]
    return Size(
        name, form, one.bytes, one.compressed_bytes, one.parameters, one.flops, one.peak_bytes,
        first.median, first.p95, first.per_second, scores,
    )  # fmt: skip


@dataclass(frozen=True)
class Printed:
    """A student's scores beside its teacher's, by task."""

    teacher_words: str
    student_words: str
    teacher: Mapping[str, float]
    student: Mapping[str, float]


SLIDES = Printed(
    "slides: BERT-base, the teacher",
    "slides: TinyBERT4, no augmentation",
    {"sst2": 0.924, "rte": 0.725, "mrpc": 0.852, "cola": 0.557},
    {"sst2": 0.906, "rte": 0.643, "mrpc": 0.683, "cola": 0.331},
)
PAPER = Printed(
    "paper: BERT-base, the teacher",
    "paper: TinyBERT4",
    {"sst2": 0.934, "rte": 0.670, "mrpc": 0.875, "cola": 0.528, "qqp": 0.711, "stsb": 0.852, "mnli": 0.839,
     "qnli": 0.909},
    {"sst2": 0.926, "rte": 0.666, "mrpc": 0.864, "cola": 0.441, "qqp": 0.713, "stsb": 0.804, "mnli": 0.825,
     "qnli": 0.877},
)  # fmt: skip
# What the slides print as the mean of the paper's scores.
AVERAGES = (("BERT-base", PAPER.teacher, 0.795), ("TinyBERT4", PAPER.student, 0.770))
# What the slides print as retention.
RETENTION = {"sst2": 0.9802, "rte": 0.893, "mrpc": 0.8017, "cola": 0.594}


@dataclass(frozen=True)
class PrintedSize:
    """A row of the slides' table of sizes: MB, its printed share of the first, and milliseconds."""

    words: str
    megabytes: float
    share: float
    milliseconds: float


SIZES = (
    PrintedSize("slides: BERT-base", 417.85, 1.0, 2814.70),
    PrintedSize("slides: TinyBERT4", 54.82, 0.1311, 209.86),
    PrintedSize("slides: BERT-base, QDQ", 105.23, 0.6463, 3436.46),
    PrintedSize("slides: BERT-base, QOperator", 105.03, 0.6463, 1436.28),
)

NOTES: Mapping[int, tuple[str, ...]] = {
    1: (
        "The slides' mrpc of .683 is the share of its larger class.",
        "The paper's numbers are of GLUE's test sets, mrpc and qqp as F1, stsb as Spearman's r; ours are of the dev"
        " sets, accuracy and Pearson's r. Official test sets are never read here.",
        "The slides' teacher has 12 layers and a width of 768, its student 4 and 312; retention is of each one's own"
        " teacher.",
    ),
    2: (
        "The slides timed one input on a machine they do not name.",
        "The paper prints 109M and 14.5M parameters, 22.5B and 1.2B FLOPs, and 9.4 times the speed.",
    ),
    4: ("The slides show augmentation for cola and rte as pictures alone, with 30 copies of an example.",),
    5: (
        "The slides prune 20% of the linear weights of the student, which is 6% of all its weights; its compressed file"
        " went from 52 to 50 MB.",
        "Retention is of the teacher; the first row is the teacher trained for as many epochs more.",
    ),
    6: ("All rows are the same student, which starts with the teacher's own layers and heads.",),
    7: ("Each single-task teacher has as many passes over its task as the multi-task one.",),
}


def slips(table: int) -> list[str]:
    """Return what the slides print and what does not follow from their numbers, in words."""
    if table == 1:
        found = {task: SLIDES.student[task] / SLIDES.teacher[task] for task in RETENTION}
        means = [(words, printed, glue_average(scores, GLUE)) for words, scores, printed in AVERAGES]
        return [
            *(
                f"{task}: the slides print a retention of {printed:.1%}, their scores give {found[task]:.1%}."
                for task, printed in RETENTION.items()
                if abs(found[task] - printed) > ROUNDING
            ),
            *(
                f"{words}: the slides print a mean of {printed:.1%}, the eight scores beside it give {mean:.2%}."
                for words, printed, mean in means
                if mean is not None and abs(mean - printed) > ROUNDING
            ),
        ]
    if table == 2:
        whole = SIZES[0].megabytes
        return [
            f"{row.words.removeprefix('slides: ')}: the slides print {row.share:.2%} of the size, {row.megabytes:g} of"
            f" {whole:g} MB is {row.megabytes / whole:.1%}."
            for row in SIZES
            if abs(row.megabytes / whole - row.share) > ROUNDING
        ]
    return []
