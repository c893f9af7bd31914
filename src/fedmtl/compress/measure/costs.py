"""What one model costs: its bytes, operations and seconds of a pass, and the machine they were measured on.

Operations are those of matrix products, a multiplication and an addition counted as two. Of a BERT with L layers of
width d, feed-forward width f and n tokens that is L (2 n (4 d^2 + 2 d f) + 4 n^2 d), and 2 d k for a head of k outputs.
A pooler is in it (2 d^2) where the task's head reads it. Norms, activations, softmax and the rows of tables, together
about a hundredth, are not.

Models are timed alternately, a block of passes each, so that what else runs on the machine slows all of them alike. The
first pass of a block is not counted: others have had the caches since the last one.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmtl.compress.measure.measured import Timing

if TYPE_CHECKING:
    from fedmtl.model.multitask import Inputs, MultiTaskModel

# All give out (..., rows, columns) and take (..., rows, inner) first.
PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "QGemm")
# What gzip takes, and most installers.
LEVEL = 6
CHUNK = 1 << 20
BLOCK = 10
# Makes a number of passes, and gives the seconds of each.
Block = Callable[[int], list[float]]
COMPUTE = ("torch", "onnxruntime")


def torch_flops(model: MultiTaskModel, task: str, inputs: Inputs) -> int:
    """Count the operations of one task's answer; leaves the model with eager attention and no unread pooler."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    # Fused attention is one operator, whose count depends on the torch build.
    model.encoder.set_attn_implementation("eager")
    if model.pools[task] != "pooler" and hasattr(model.encoder, "pooler"):
        model.encoder.pooler = None
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model.head(task, model.pool(task, *model.encode(task, inputs)))
    return int(counter.get_total_flops())


def onnx_flops(path: Path, output: str, given: Mapping[str, np.ndarray]) -> int:
    """Of one output of an ONNX file, from the shapes its products have as the file stands, before any fusion."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "pass")
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(_cut(path, output), options, providers=["CPUExecutionProvider"])
        session.run([output], dict(given))
        events = json.loads(Path(session.end_profiling()).read_text())
    return sum(_product(event["args"]) for event in events if _is_product(event))


def _cut(path: Path, output: str) -> bytes:
    """The file with what leads to one output only; ONNX Runtime may compute the other heads too."""
    import onnx

    model = onnx.load(path)
    wanted, nodes = {output}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            nodes.append(node)
    outputs = [value for value in model.graph.output if value.name == output]
    for values, left in ((model.graph.node, nodes[::-1]), (model.graph.output, outputs)):
        del values[:]
        values.extend(left)
    whole: bytes = model.SerializeToString()
    return whole


def _is_product(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and event.get("args", {}).get("op_name") in PRODUCTS


def _product(args: Mapping[str, Any]) -> int:
    first, output = (next(iter(args[key][0].values())) for key in ("input_type_shape", "output_type_shape"))
    return 2 * int(math.prod(output)) * int(first[-1])


def disk_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder; in a run's model the encoder for other programs is a copy."""
    return sum(file.stat().st_size for file in _files(path))


def compressed_bytes(path: Path) -> int:
    """The size after zlib at level 6, the files of a folder one after another as one stream."""
    stream = zlib.compressobj(LEVEL)
    total = 0
    for file in _files(path):
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                total += len(stream.compress(chunk))
    return total + len(stream.flush())


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file())
        is_model = (path / "tasks.json").is_file()
        yield from sorted(file for file in found if not (is_model and file.relative_to(path).parts[0] == "encoder"))
    else:
        yield path


def time_block(make_pass: Callable[[], object], passes: int) -> list[float]:
    """The seconds of each of so many passes, after one that is not counted."""
    make_pass()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        make_pass()
        seconds.append(time.perf_counter() - start)
    return seconds


def interleave(blocks: Sequence[Block], repeats: int, block: int = BLOCK) -> Iterator[list[list[float]]]:
    """Run a block of passes of each in rotation until each made `repeats`; yield all seconds after every rotation."""
    for ask in blocks:
        ask(2)
    taken: list[list[float]] = [[] for _ in blocks]
    for start in range(0, repeats, block):
        for ask, seconds in zip(blocks, taken, strict=True):
            seconds += ask(min(block, repeats - start))
        yield taken


def timing(threads: int, seconds: Sequence[float], batch: int, waiting: float | None = None) -> Timing:
    """What these passes of `batch` examples come to."""
    median, p95 = (float(np.quantile(seconds, share)) for share in (0.5, 0.95))
    return Timing(threads, median, p95, batch * len(seconds) / sum(seconds), waiting)


def machine() -> str:
    """The CPU, the cores this process may use, and the versions of what computes."""
    cores = len(os.sched_getaffinity(0))
    versions = [f"{name} {found}" for name in COMPUTE if (found := _version(name))]
    return ", ".join([_cpu(), f"{cores} {'core' if cores == 1 else 'cores'}", *versions])


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
