"""What the models of a study cost on this machine: bytes, parameters, FLOPs and latency, in float and in INT8.

Measured when every cell has ended, so that nothing else runs. What was measured is kept, and measured again only where
a model is another one. INT8 files are scored on the validation examples; float ones compute what their cell does.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmtl.compress.measure.variants import Load, Measured, Variant, measure
from fedmtl.config import Config
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.study.compression.results import Result
from fedmtl.study.folder import StudyFolder

if TYPE_CHECKING:
    from fedmtl.tasks.load import TaskData

LOAD = Load(batch=1, length=128, threads=(1,))
NO_ONNX = "onnx, onnxscript or onnxruntime is not installed here: rows of ONNX files are left out."
# Of each task; half of them give ranges.
CALIBRATION = 128

Say = Callable[[str], None]


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
    """All that was measured, and what is to be said of it."""

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
    found = _read(folder)
    if any(found.get(name) != value for name, value in key.items()):
        rows = _measure(folder.path / "onnx", runs, results, config if can_write else None, say) if runs else []
        kept = {**key, "rows": [asdict(row) for row in rows]}
        write_atomic(_kept(folder), json.dumps(kept, indent=1).encode())


def has_onnx() -> bool:
    """Whether ONNX files can be written, quantized and run here."""
    return all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def kept_sizes(folder: StudyFolder, results: Mapping[str, Result]) -> Sizes:
    """What was measured of these very models."""
    found, weights = _read(folder), _weights(results)
    rows = [row for row in found.get("rows", ()) if weights.get(row["setup"]) == found["weights"][row["setup"]]]
    return Sizes(tuple(Size(**row) for row in rows), () if found.get("onnx", True) else (NO_ONNX,))


def _weights(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.weights_sha256 for name, result in results.items()}


def _kept(folder: StudyFolder) -> Path:
    return folder.path / "sizes.json"


def _read(folder: StudyFolder) -> dict[str, Any]:
    path = _kept(folder)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _measure(
    place: Path, runs: Mapping[str, RunFolder], known: Mapping[str, Result], config: Config | None, say: Say
) -> list[Size]:
    """`config` None is without ONNX files, which alone need data."""
    variants: list[tuple[str, str, Variant]] = []
    scores: dict[str, dict[str, float | None]] = {}
    data = {} if config is None else _load(config)
    for number, (name, run) in enumerate(runs.items(), start=1):
        forms = {"fedmtl": run.path}
        if config is not None:
            say(f"  ONNX files of {name}, {number} of {len(runs)}")
            forms |= _write_files(place, name, run, data)
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


def _load(config: Config) -> dict[str, TaskData]:
    from fedmtl.tasks.load import load_tasks

    return load_tasks(config)


def _write_files(place: Path, name: str, run: RunFolder, data: Mapping[str, Any]) -> dict[str, Path]:
    from fedmtl.compress.quantize import Quantization, needs_reduced_range, quantize
    from fedmtl.export.onnx import export_onnx
    from fedmtl.predict.onnx import OnnxModel, feeds, open_onnx
    from fedmtl.predict.run import load_run

    files = {"onnx": place / f"{name}.onnx", "int8": place / f"{name}.int8.onnx"}
    place.mkdir(parents=True, exist_ok=True)
    loaded = load_run(run)
    export_onnx(loaded.saved, loaded.bound, files["onnx"])
    model: OnnxModel = open_onnx(files["onnx"])
    given = [feeds(model, model.tasks[task], [row]) for task in model.tasks for row in _texts(data[task].train.texts)]
    quantize(files["onnx"], files["int8"], Quantization(reduce_range=needs_reduced_range()), given)
    return files


def _texts(columns: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Some rows, evenly over the whole."""
    rows = list(zip(*columns, strict=True))
    count = min(CALIBRATION // 2, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def _score(file: Path, data: Mapping[str, Any]) -> dict[str, float | None]:
    from fedmtl.predict.onnx import compute, open_onnx
    from fedmtl.tasks.metrics import score, sum_predictions

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
