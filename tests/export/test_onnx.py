"""One graph for all tasks gives what our model gives, for any rows and any length."""

import numpy as np
import pytest
import torch

from compress.onnx_models import TASKS, make_saved
from fedmtl.errors import ModelError
from fedmtl.export.onnx import export_onnx
from fedmtl.predict.onnx import FORMAT_KEY, compute, open_onnx, output_name
from fedmtl.sharing.plan import Key, SharingPlan
from model.tiny import LENGTH, PAIRS, SINGLES, encode, make_task, write_encoder

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

# Of one, two and four rows, with and without padding.
ROWS = (PAIRS[:1], PAIRS[2:], PAIRS, [PAIRS[1]] * 2)


@torch.inference_mode()
def ours(saved, task, rows):
    return saved.bind().use(task.name)(task.name, encode(saved.encoder.tokenizer, task, rows)).numpy()


def check_equal(saved, file):
    model = open_onnx(file, threads=1)
    for task in saved.tasks.values():
        for pairs in ROWS:
            rows = pairs if task.is_pair else [pair[:1] for pair in pairs]
            found = compute(model, [task.name], rows)[task.name]
            np.testing.assert_allclose(found, ours(saved, task, rows), rtol=0, atol=1e-4)
    return model


def test_the_graph_gives_our_outputs_for_any_rows_and_length(exported):
    model = check_equal(*exported)
    # One text, then two of other lengths in one padded call, give the same.
    together = compute(model, ["single"], SINGLES)["single"]
    alone = np.concatenate([compute(model, ["single"], [row])["single"] for row in SINGLES])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


def test_every_head_can_be_asked_at_once_whatever_the_rows(exported):
    _, file = exported
    model = open_onnx(file, threads=1)
    names = [output_name(task.name) for task in TASKS]
    assert [output.name for output in model.session.get_outputs()] == names
    for num_rows in (1, 2, 3):
        ones = np.ones((num_rows, 5), dtype=np.int64)
        outputs = model.session.run(names, {name: ones * (name != "token_type_ids") for name in model.inputs})
        half = (num_rows + 1) // 2
        assert [output.shape for output in outputs] == [(num_rows, 2), (num_rows, 3), (half, 1), (half, 1)]


def test_the_file_alone_has_the_tasks_and_the_tokenizer(exported):
    saved, file = exported
    model = open_onnx(file, threads=1)
    assert model.tasks == saved.tasks
    assert model.max_length == LENGTH
    long = "the plot is dull " * 30
    assert len(model.tokenizer.encode(long).ids) == LENGTH
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        pytest.param("roberta", "pooler", marks=pytest.mark.slow),
        pytest.param("modernbert", "mean", marks=pytest.mark.slow),
        pytest.param("distilbert", "cls", marks=pytest.mark.slow),
        pytest.param("mpnet", "mean", marks=pytest.mark.slow),
    ],
)
def test_encoders_that_take_other_inputs(tmp_path, kind, pool):
    tasks = [make_task("single", pool=pool), make_task("dual", pool=pool, text=("a", "b"), pair="dual")]
    saved = make_saved(write_encoder(kind, tmp_path / "encoder"), tasks)
    model = check_equal(saved, export_onnx(saved, saved.bind(), tmp_path / "model.onnx"))
    assert model.inputs == ("input_ids", "attention_mask")


@pytest.mark.slow
def test_layers_of_a_tasks_own_are_branches_and_lora_is_part_of_its_layers(tmp_path):
    pytest.importorskip("peft")
    tasks = [make_task("single", pool="cls"), make_task("cross", pool="mean", text=("a", "b"))]
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "task"), ("*", "all")))
    saved = make_saved(write_encoder("bert", tmp_path / "encoder"), tasks, plan, lora={"rank": 2, "alpha": 4.0})
    first, second = (Key(f"task:{task.name}", "encoder.layer.1.output.dense.weight") for task in tasks)
    assert not torch.equal(saved.weights[first], saved.weights[second])
    file = export_onnx(saved, saved.bind(), tmp_path / "model.onnx")
    check_equal(saved, file)
    graph = onnx.load(file).graph
    # Layer 0 once, layer 1 once a task: eight products a layer, of which two have no weights.
    assert sum(node.op_type == "MatMul" for node in graph.node) == 8 * 3
    assert not [value.name for value in graph.initializer if "lora" in value.name]


def test_a_file_that_is_not_ours_is_refused(exported, tmp_path):
    _, file = exported
    model = onnx.load(file)
    entry = next(entry for entry in model.metadata_props if entry.key == FORMAT_KEY)
    entry.value = "7"
    onnx.save(model, tmp_path / "later.onnx")
    with pytest.raises(ModelError, match="has format 7, this version reads 1"):
        open_onnx(tmp_path / "later.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match="is not a file of fedmtl"):
        open_onnx(tmp_path / "other.onnx")
    (tmp_path / "torn.onnx").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="ONNX Runtime cannot load it"):
        open_onnx(tmp_path / "torn.onnx")
    with pytest.raises(ModelError, match="no such file"):
        open_onnx(tmp_path / "none.onnx")


def test_a_missing_extra_is_one_line(exported, monkeypatch):
    _, file = exported
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs onnxruntime, which is not installed; .*'\.\[onnx\]'"):
        open_onnx(file)
