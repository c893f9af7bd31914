"""INT8 files: small, near the float file, and refused where they make no sense."""

import json

import numpy as np
import pytest

from fedmtl.compress.onnx_rewrites import damp_outliers, damping, largest_inputs, linear_layers, quantize_tables
from fedmtl.compress.quantize import QUANTIZED_KEY, Quantization, needs_reduced_range, quantize, quantize_measured
from fedmtl.errors import ModelError
from fedmtl.predict.onnx import compute, feeds, open_onnx, open_session
from model.tiny import SINGLES, WORDS

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

SCHEMES = ("dynamic", "qdq", "qoperator")


@pytest.fixture
def float_file(exported):
    return exported[1]


@pytest.fixture(scope="module")
def texts():
    generator = np.random.default_rng(0)
    return [(" ".join(generator.choice(WORDS, size=generator.integers(2, 12))),) for _ in range(40)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_int8_file_is_small_and_near_the_float_file(float_file, texts, tmp_path, scheme):
    made = quantize_measured(
        float_file, tmp_path / "int8.onnx", Quantization(scheme), lambda model: {"single": texts}, threads=1
    )
    assert made.agreement["single"] >= 0.9
    assert min(made.seconds_before, made.seconds_after) > 0
    before, after = open_onnx(float_file, 1), open_onnx(made.file, 1)
    exact, rounded = (compute(model, ["single"], texts, batch=1)["single"] for model in (before, after))
    # A step of 8 bits is 1/255 of a range; errors of two layers stay within a tenth of the spread.
    assert 0 < np.sqrt(np.mean((exact - rounded) ** 2)) < 0.1 * exact.std()
    assert after.tasks == before.tasks
    model = onnx.load(made.file)
    weights = [value for value in model.graph.initializer if len(value.dims) == 2 and np.prod(value.dims) >= 32 * 32]
    assert {value.data_type for value in weights} == {onnx.TensorProto.INT8}


def test_an_answer_does_not_depend_on_the_texts_beside_it(float_file, texts, tmp_path):
    quantize(float_file, tmp_path / "int8.onnx", Quantization(), [])
    exact, rounded = open_onnx(float_file, 1), open_onnx(tmp_path / "int8.onnx", 1)
    alone, together = (compute(rounded, ["single"], texts, batch)["single"] for batch in (1, len(texts)))
    # Rounding itself moves answers by far more than padding and the order of sums do.
    error = np.abs(alone - compute(exact, ["single"], texts, 1)["single"]).max()
    assert np.abs(alone - together).max() < 0.01 * error


def test_small_tables_stay_in_float():
    tables = {"words": np.eye(60, 8, dtype=np.float32), "segments": np.full((2, 8), 0.3, np.float32)}
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Gather", ["words", "ids"], ["a"]),
            onnx.helper.make_node("Gather", ["segments", "types"], ["b"]),
            onnx.helper.make_node("Add", ["a", "b"], ["sum"]),
        ],
        "embeddings",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["n"]) for name in ("ids", "types")],
        [onnx.helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, ["n", 8])],
        [onnx.numpy_helper.from_array(value, name) for name, value in tables.items()],
    )
    model = onnx.helper.make_model(graph)
    # 16 of 496 values are 3.2%: more than what counts as small.
    quantize_tables(model)
    assert {value.name for value in model.graph.initializer} >= {"words.int8", "segments.int8"}
    larger = onnx.helper.make_model(graph)
    larger.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.eye(200, 8, dtype=np.float32), "words"))
    quantize_tables(larger)
    assert "segments" in {value.name for value in larger.graph.initializer}
    assert "words.int8" in {value.name for value in larger.graph.initializer}


def test_heads_stay_in_float(float_file, texts, tmp_path):
    quantize(float_file, tmp_path / "int8.onnx", Quantization(), [])
    heads = [value for value in onnx.load(tmp_path / "int8.onnx").graph.initializer if ".heads." in value.name]
    assert {value.data_type for value in heads} == {onnx.TensorProto.FLOAT}


def test_damping_brings_an_outlier_down_and_changes_no_answer(float_file):
    # Nine tenths of the way through eleven channels lies the tenth, 10; 20 is twice as much.
    assert damping(np.array([*range(1, 11), 20.0])).tolist() == [1.0] * 10 + [2.0]
    model = onnx.load(float_file)
    opened = open_onnx(float_file, 1)
    given = [feeds(opened, opened.tasks["single"], SINGLES)]
    largest = largest_inputs(model, given)
    assert set(largest) == set(linear_layers(model.graph))
    damp_outliers(model, largest)
    after = largest_inputs(model, given)
    for name, values in largest.items():
        limit = np.quantile(values, 0.9)
        np.testing.assert_allclose(after[f"{name}.damped"], np.minimum(values, limit), rtol=1e-5)
        assert values.max() > limit
    outputs = open_session(model.SerializeToString(), 1).run(None, given[0])[0]
    np.testing.assert_allclose(outputs, opened.session.run(None, given[0])[0], rtol=0, atol=1e-5)


def test_what_cannot_be_quantized(float_file, tmp_path):
    with pytest.raises(ModelError, match="quantize --scheme qdq: ranges are measured on text; give some with --texts"):
        quantize(float_file, tmp_path / "a.onnx", Quantization("qdq"), [])
    quantize(float_file, tmp_path / "a.onnx", Quantization(), [])
    with pytest.raises(ModelError, match="is quantized already"):
        quantize(tmp_path / "a.onnx", tmp_path / "b.onnx", Quantization(), [])
    props = {entry.key: entry.value for entry in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert json.loads(props[QUANTIZED_KEY]) == {"scheme": "dynamic", "all_ops": False, "reduce_range": False}


@pytest.mark.parametrize(
    ("flags", "needed"), [("fma avx2", True), ("avx2 avx512_vnni", False), ("avx2 avx_vnni", False), ("asimd", False)]
)
def test_a_cpu_that_would_overflow_gets_seven_bits(monkeypatch, flags, needed):
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: f"flags : {flags}\n")
    assert needs_reduced_range() is needed
