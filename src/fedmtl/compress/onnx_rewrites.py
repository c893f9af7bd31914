"""Changes to an ONNX graph that make 8 bits enough for it.

Tokens: ONNX Runtime gives activations one range for a whole batch, which a neighbour's outliers stretch. Where ranges
are of the text at hand, every token gets one instead: it is divided by its largest value before it is rounded, and
what the layer makes of it is multiplied by that again. No answer then depends on the texts beside it.

Outliers, where ranges are measured beforehand: encoders have a few channels ten times as large as the others, and 8
bits over the whole range leave those others three or four. As in SmoothQuant (Xiao et al. 2022) such a channel is
divided by a factor before a linear layer, and the layer's weights for it are multiplied by the same. We differ in the
factor: channels beyond nine tenths of the others come down to there, and the rest stay as they are.

Tables: an embedding table becomes 8 bits with a scale for every row, which rounding changes least. Positions and
segments stay in float: they are small, and an error in them is the same in every text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# Nine tenths of the channels are not touched.
USUAL = 0.9
LEAST = 1e-6
# A table below this share of all values stays in float: there is next to nothing to gain.
SMALL_TABLE = 0.02
# Of 8 bits without signs: what 0 is rounded to, and the steps on either side of it.
ZERO, STEPS = 128, 127

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


def scale_by_token(model: Any) -> None:
    """Change a dynamically quantized graph: round the input of each linear layer with a scale for every token."""
    from onnx import helper, numpy_helper

    graph = model.graph
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for given in node.input:
            users.setdefault(given, []).append(node)
    nodes: list[Any] = []
    rescaled: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "DynamicQuantizeLinear" and _feeds_layers(node, users, graph):
            (value,), (rounded, scale, zero) = node.input, node.output
            size, part = f"{value}.size", f"{value}.part"
            nodes += [
                helper.make_node("Abs", [value], [f"{value}.abs"], name=f"{value}.abs"),
                helper.make_node("ReduceMax", [f"{value}.abs", "token.axis"], [f"{value}.most"], name=f"{value}.most"),
                helper.make_node("Max", [f"{value}.most", "token.least"], [size], name=size),
                helper.make_node("Div", [value, size], [part], name=part),
                helper.make_node("QuantizeLinear", [part, "token.scale", "token.zero"], [rounded], name=rounded),
            ]
            for user in users[rounded]:
                rescaled[_behind(user, users).output[0]] = size
            for name, constant in ((scale, "token.scale"), (zero, "token.zero")):
                for user in users.get(name, []):
                    user.input[list(user.input).index(name)] = constant
            continue
        nodes.append(node)
        if node.output[0] in rescaled:
            output, size = node.output[0], rescaled[node.output[0]]
            node.output[0] = f"{output}.part"
            nodes.append(helper.make_node("Mul", [f"{output}.part", size], [output], name=f"{output}.rescaled"))
    del graph.node[:]
    graph.node.extend(nodes)
    constants = {"token.axis": np.array([-1], np.int64), "token.least": np.array(LEAST, np.float32)}
    constants |= {"token.scale": np.array(1 / STEPS, np.float32), "token.zero": np.array(ZERO, np.uint8)}
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())


def _feeds_layers(node: Any, users: Mapping[str, list[Any]], graph: Any) -> bool:
    """Whether only products with constant matrices take what is rounded here, as their first factor."""
    constants = {value.name for value in graph.initializer}
    takers = users.get(node.output[0], [])
    return all(
        user.op_type == "MatMulInteger" and user.input[0] == node.output[0] and user.input[1] in constants
        for user in takers
    )


def _behind(product: Any, users: Mapping[str, list[Any]]) -> Any:
    """The node that makes numbers of a rounded product: it is cast, then multiplied by both scales."""
    (cast,) = users[product.output[0]]
    (scaled,) = users[cast.output[0]]
    assert (cast.op_type, scaled.op_type) == ("Cast", "Mul"), "as ONNX Runtime's quantizer writes it"
    return scaled


def quantize_tables(model: Any) -> None:
    """Change the graph: give every embedding table but small ones 8 bits and a scale a row."""
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
    values = sum(math.prod(other.dims) for other in graph.initializer)
    if math.prod(value.dims) < SMALL_TABLE * values:
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
