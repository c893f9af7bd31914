"""Changes to an ONNX graph that leave its answers as they are and make 8 bits enough for it.

Outliers: encoders have a few channels ten times as large as the others, and 8 bits over the whole range leave those
others three or four. As in SmoothQuant (Xiao et al. 2022) such a channel is divided by a factor before a linear layer,
and the layer's weights for it are multiplied by the same. We differ in the factor: channels beyond nine tenths of the
others come down to there, and the rest stay as they are.

Tables: an embedding table becomes 8 bits with a scale for every row, which rounding changes least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# Nine tenths of the channels are not touched.
USUAL = 0.9
LEAST = 1e-6

Feeds = dict[str, np.ndarray]


def linear_layers(graph: Any) -> dict[str, list[Any]]:
    """Input -> the products with a constant matrix that take it."""
    constants = {value.name for value in graph.initializer}
    layers: dict[str, list[Any]] = {}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants and node.input[0] not in constants:
            layers.setdefault(node.input[0], []).append(node)
    return layers


def largest_inputs(model: Any, given: Iterable[Feeds]) -> dict[str, np.ndarray]:
    """For every linear layer's input, the largest absolute value of each channel over these texts."""
    import onnx

    from fedmtl.predict.onnx import open_session

    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    names = list(linear_layers(watched.graph))
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = open_session(watched.SerializeToString())
    largest: dict[str, np.ndarray] = {}
    for feeds in given:
        for name, value in zip(names, session.run(names, feeds), strict=True):
            here = np.abs(value.reshape(-1, value.shape[-1])).max(axis=0)
            largest[name] = np.maximum(largest.get(name, here), here)
    return largest


def damping(largest: np.ndarray) -> np.ndarray:
    """What each channel is divided by: 1, or for an outlier what brings it down to the usual."""
    usual = max(float(np.quantile(largest, USUAL)), LEAST)
    return np.maximum(1.0, largest / usual).astype(np.float32)


def damp_outliers(model: Any, largest: Mapping[str, np.ndarray]) -> None:
    """Change the graph: divide outliers before linear layers, and multiply the layers' weights instead."""
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {value.name: value for value in graph.initializer}
    added: dict[str, Any] = {}
    scaled: set[str] = set()
    for name, nodes in linear_layers(graph).items():
        weights = {node.input[1] for node in nodes}
        # A matrix that several inputs meet (ALBERT's layers share theirs) has no single factor.
        if name not in largest or weights & scaled or _uses(graph, weights) > len(nodes):
            continue
        factor = damping(largest[name])
        for weight in weights:
            value = numpy_helper.to_array(constants[weight]) * factor[:, None]
            constants[weight].CopyFrom(numpy_helper.from_array(value, weight))
        scaled |= weights
        graph.initializer.append(numpy_helper.from_array(1 / factor, f"{name}.damping"))
        added[name] = helper.make_node("Mul", [name, f"{name}.damping"], [f"{name}.damped"], name=f"{name}.damp")
        for node in nodes:
            node.input[0] = f"{name}.damped"
    _insert_after(graph, added)


def quantize_tables(model: Any) -> None:
    """Change the graph: give every embedding table 8 bits and a scale a row."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    nodes: list[Any] = []
    tables = {value.name: value for value in graph.initializer if _is_table(graph, value)}
    for node in graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables:
            nodes.append(node)
            continue
        table, ids, (output,) = node.input[0], node.input[1], node.output
        rounded, scale, cast = f"{output}.rounded", f"{output}.scale", f"{output}.cast"
        nodes += [
            helper.make_node("Gather", [f"{table}.int8", ids], [rounded], name=f"{output}.rows"),
            helper.make_node("Gather", [f"{table}.scale", ids], [scale], name=f"{output}.scales"),
            helper.make_node("Cast", [rounded], [cast], name=f"{output}.to_float", to=TensorProto.FLOAT),
            helper.make_node("Mul", [cast, scale], [output], name=f"{output}.scaled"),
        ]
    for name, value in tables.items():
        rows = numpy_helper.to_array(value)
        scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), LEAST) / 127
        graph.initializer.remove(value)
        graph.initializer.append(numpy_helper.from_array(np.rint(rows / scales).astype(np.int8), f"{name}.int8"))
        graph.initializer.append(numpy_helper.from_array(scales.astype(np.float32), f"{name}.scale"))
    del graph.node[:]
    graph.node.extend(nodes)


def _is_table(graph: Any, value: Any) -> bool:
    """Two dimensions of numbers of which nothing but rows is read."""
    if len(value.dims) != 2 or value.data_type != 1:
        return False
    users = [node for node in graph.node if value.name in node.input]
    return bool(users) and all(node.op_type == "Gather" and _axis(node) == 0 for node in users)


def _axis(node: Any) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def _uses(graph: Any, names: set[str]) -> int:
    return sum(given in names for node in graph.node for given in node.input)


def _insert_after(graph: Any, added: Mapping[str, Any]) -> None:
    """Put each node behind the one that makes its input."""
    nodes: list[Any] = []
    for node in list(graph.node):
        nodes.append(node)
        nodes += [added[output] for output in node.output if output in added]
    del graph.node[:]
    graph.node.extend(nodes)
