"""Operations of one pass: those of matrix products, a multiplication and an addition counted as two.

Of a BERT with L layers of width d, feed-forward width f and n tokens that is L (2 n (4 d^2 + 2 d f) + 4 n^2 d), and
2 d k for a head of k outputs. A pooler is in it (2 d^2) where the task's head reads it. Norms, activations, softmax and
the rows of tables, together about a hundredth, are not.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedmtl.model.multitask import Inputs, MultiTaskModel

# All give out (..., rows, columns) and take (..., rows, inner) first.
PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "QGemm")


def torch_flops(model: MultiTaskModel, task: str, inputs: Inputs) -> int:
    """Of one task's answer, by the encoder's own module; leaves the model with eager attention and no unread pooler."""
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
    wanted, kept = {output}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            kept.append(node)
    outputs = [value for value in model.graph.output if value.name == output]
    for values, left in ((model.graph.node, kept[::-1]), (model.graph.output, outputs)):
        del values[:]
        values.extend(left)
    whole: bytes = model.SerializeToString()
    return whole


def _is_product(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and event.get("args", {}).get("op_name") in PRODUCTS


def _product(args: Mapping[str, Any]) -> int:
    first, output = (next(iter(args[key][0].values())) for key in ("input_type_shape", "output_type_shape"))
    return 2 * int(math.prod(output)) * int(first[-1])
