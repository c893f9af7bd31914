"""An ONNX file of ours in INT8: weights in 8 bits with signs and a scale a channel, activations in 8 bits without.

* `dynamic`: every token gets a range from its values. A linear layer's answer is float again.
* `qdq`: ranges are measured beforehand on texts; the file says where to round, ONNX Runtime chooses the operators.
* `qoperator`: the same ranges, with 8-bit operators in the file; they round their answers too, which costs agreement.

Ranges are measured on the training text of the model's run, or on a file's lines. Linear layers and embedding tables
become 8 bits, unless `all_ops` selects everything that can. Heads stay as they are: there is nothing to gain.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmtl.compress.measure.costs import interleave, time_block, timing
from fedmtl.compress.onnx_rewrites import Feeds, damp_outliers, largest_inputs, quantize_tables, scale_by_token
from fedmtl.config.file import load_config
from fedmtl.errors import DataError, FedmtlError, ModelError
from fedmtl.predict.onnx import OnnxModel, Row, feeds, made_up_feeds, open_onnx, require, run, run_of
from fedmtl.runs.folder import write_atomic
from fedmtl.tasks.load import load_tasks

QUANTIZED_KEY = "fedmtl.quantized"
LINEAR = ("MatMul", "Gemm")
# What is in the names of a head's values, and of its hidden layer's.
HEADS = (".heads.", ".hidden.")
# Of the text that is timed.
LENGTH = 128
Scheme = Literal["dynamic", "qdq", "qoperator"]


def calibration_rows(model: OnnxModel, file: Path | None, most: int) -> dict[str, list[Row]]:
    """For each task some of its training texts, spread over all; none where the file lies in no run's folder."""
    if file is not None:
        return _from_file(model, file, most)
    try:
        run = run_of(model.path)
    except FedmtlError:
        return {}
    data = load_tasks(load_config(run.config), model.tasks)
    columns = {name: data[name].train.texts for name in model.tasks}
    return {name: _spread(list(zip(*texts, strict=True)), most) for name, texts in columns.items()}


def _from_file(model: OnnxModel, file: Path, most: int) -> dict[str, list[Row]]:
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    rows: list[Row] = [tuple(line.split("\t")) for line in lines if line.strip()]
    found = {}
    for name, task in model.tasks.items():
        fitting = [row for row in rows if len(row) == len(task.text) and all(map(str.strip, row))]
        if fitting:
            found[name] = _spread(fitting, most)
    if not found:
        raise DataError(f"{file}: no line fits a task of {model.path.name}; give one text a line, or two with a tab")
    return found


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows, spread evenly over all."""
    count = min(most, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


@dataclass(frozen=True)
class Quantization:
    """How a file is made small; `reduce_range` keeps weights to 7 bits for CPUs whose 8-bit sums would overflow."""

    scheme: Scheme = "dynamic"
    all_ops: bool = False
    reduce_range: bool = False


def quantize(source: Path, file: Path, how: Quantization, given: Sequence[Feeds]) -> None:
    """Write the model of `source` in INT8; `given` are batches of usual text, which `dynamic` does without."""
    require("quantize", "onnx", "onnxruntime")
    import onnx

    model = onnx.load(source)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if QUANTIZED_KEY in metadata:
        raise ModelError(f"{source}: is quantized already; give the file that `fedmtl export --to onnx` wrote")
    if not given and how.scheme != "dynamic":
        raise ModelError(f"quantize --scheme {how.scheme}: ranges are measured on text; give some with --texts")
    # The quantizer trusts these, and the exporter's do not name the new values.
    del model.graph.value_info[:]
    if how.scheme != "dynamic":
        damp_outliers(model, largest_inputs(model, given))
    quantize_tables(model)
    small = _quantized(model, how, given)
    if how.scheme == "dynamic":
        scale_by_token(small)
    del small.metadata_props[:]
    onnx.helper.set_model_props(small, {**metadata, QUANTIZED_KEY: json.dumps(asdict(how))})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, small.SerializeToString())


@dataclass(frozen=True)
class Quantized:
    """What became of a file: sizes, median times of one text, and for each classification how often labels agree."""

    source: Path
    file: Path
    bytes_before: int
    bytes_after: int
    length: int
    seconds_before: float
    seconds_after: float
    agreement: dict[str, float]


def quantize_measured(
    source: Path,
    file: Path,
    how: Quantization,
    rows_of: Callable[[OnnxModel], Mapping[str, Sequence[Row]]],
    threads: int | None = None,
) -> Quantized:
    """Quantize and measure: half of each task's rows give the ranges, both files predict the others."""
    before = open_onnx(source, threads)
    batches = {
        task: [feeds(before, before.tasks[task], [row]) for row in rows] for task, rows in rows_of(before).items()
    }
    given = [batch for task in batches.values() for batch in task[::2]]
    quantize(source, file, how, given)
    after = open_onnx(file, threads)
    length = min(before.max_length, LENGTH)
    seconds = median_times([before, after], length)
    compared = {task: rest[1::2] for task, rest in batches.items() if before.tasks[task].kind_of.has_labels}
    return Quantized(
        source,
        file,
        source.stat().st_size,
        file.stat().st_size,
        length,
        seconds[0],
        seconds[1],
        {task: agreement(before, after, task, rest) for task, rest in compared.items() if rest},
    )


def _quantized(model: Any, how: Quantization, given: Sequence[Feeds]) -> Any:
    import onnx
    from onnxruntime import quantization as ort

    common: dict[str, Any] = {
        "op_types_to_quantize": None if how.all_ops else list(LINEAR),
        "nodes_to_exclude": _heads(model.graph),
        "per_channel": True,
        "reduce_range": how.reduce_range,
        "weight_type": ort.QuantType.QInt8,
    }
    with tempfile.TemporaryDirectory() as folder, _quiet():
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(model, before)
        if how.scheme == "dynamic":
            options = {"MatMulConstBOnly": not how.all_ops}
            ort.quantize_dynamic(before, after, extra_options=options, **common)
        else:
            _quantize_static(ort, before, after, how, given, common)
        return onnx.load(after)


def _quantize_static(
    ort: Any, before: Path, after: Path, how: Quantization, given: Sequence[Feeds], common: dict[str, Any]
) -> None:
    class Texts(ort.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(given)

        def get_next(self) -> Feeds | None:
            return next(self.left, None)

    options: dict[str, Any] = {"MatMulConstBOnly": not how.all_ops}
    if how.scheme == "qdq" and not how.all_ops:
        # What a linear layer gives is added to and normalized in float: rounding it would only cost.
        options["OpTypesToExcludeOutputQuantization"] = list(LINEAR)
    formats = {"qdq": ort.QuantFormat.QDQ, "qoperator": ort.QuantFormat.QOperator}
    ort.quantize_static(
        before,
        after,
        Texts(),
        quant_format=formats[how.scheme],
        activation_type=ort.QuantType.QUInt8,
        extra_options=options,
        **common,
    )


def _heads(graph: Any) -> list[str]:
    """The nodes that are heads, under the names the quantizer sees."""
    heads = [node.name for node in graph.node if any(part in given for given in node.input for part in HEADS)]
    # It first makes a product and a sum of every Gemm.
    return [name for head in heads for name in (head, f"{head}_MatMul")]


def needs_reduced_range() -> bool:
    """Whether this CPU adds products of 8 bits in 16, which overflow; those with VNNI, and ARM's, do not."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx2" in flags and "vnni" not in flags


def median_times(models: Sequence[OnnxModel], length: int, runs: int = 30) -> list[float]:
    """Return each model's median seconds for one row of that length and the first head; the models alternate."""
    taken = list(interleave([partial(time_block, partial(_one_pass, model, length)) for model in models], runs))[-1]
    return [timing(1, seconds, 1).median for seconds in taken]


def _one_pass(model: OnnxModel, length: int) -> list[np.ndarray]:
    return run(model, [next(iter(model.tasks))], made_up_feeds(model, 1, length))


def agreement(first: OnnxModel, second: OnnxModel, task: str, given: Sequence[Feeds]) -> float:
    """The share of rows, one a batch, to which both give the same label, or the same labels."""
    same = [np.array_equal(_labels(first, task, feeds), _labels(second, task, feeds)) for feeds in given]
    return sum(same) / len(same)


def _labels(model: OnnxModel, task: str, feeds: Feeds) -> np.ndarray:
    resolved = model.tasks[task]
    outputs = run(model, [task], feeds)[0]
    return resolved.kind_of.predicted(resolved, np.concatenate(outputs) if resolved.kind_of.by_word else outputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantizer's advice to the root logger inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
