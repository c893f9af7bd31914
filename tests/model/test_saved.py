import hashlib
from pathlib import Path

import pytest
import torch

from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import load_model, save_model
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.sharing.plan import Key, SharingPlan, weights_sha256
from fedmtl.sharing.weights import count_parameters, initial_weights, layer_counts, scope_counts

from .tiny import KINDS, LENGTH, PAIRS, encode, load, make_task

TASKS = [
    make_task("cross", text=("a", "b"), labels=("x", "y", "z"), class_weights=(1.0, 2.0, 0.5), pool="mean"),
    make_task("dual", kind="regression", text=("a", "b"), pair="dual", score_range=(1.0, 5.0), patience=3, pool="cls"),
]
PLAN = SharingPlan((("heads.*", "task"), ("*norm*", "group"), ("*", "all")), ({"cross": "g"}, {"cross": "g/h"}))
CONFIG = ModelConfig(max_length=LENGTH)
BERT_PLAN = SharingPlan((("heads.*", "task"), ("*LayerNorm*", "group"), ("*", "all")), PLAN.groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_gives_the_same_outputs_and_tasks(folders, tmp_path: Path, kind):
    encoder, model = load(folders[kind], TASKS)
    plan = PLAN if any("norm" in name for name in model.canonical()) else BERT_PLAN
    weights = initial_weights(model, plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = {key: value + 0.1 * torch.randn_like(value) for key, value in weights.items()}
    save_model(tmp_path, encoder, model.tasks, plan, weights, CONFIG)
    saved = load_model(tmp_path)
    assert saved.tasks == model.tasks
    assert saved.plan == plan
    assert saved.max_length == LENGTH
    assert weights_sha256(saved.weights) == weights_sha256(weights)
    ours = BoundModel(model, plan, list(model.tasks), "", weights)
    theirs = saved.bind()
    for task in TASKS:
        inputs = encode(encoder.tokenizer, task, PAIRS)
        again = encode(saved.encoder.tokenizer, task, PAIRS)
        assert torch.equal(inputs.ids, again.ids)
        assert torch.equal(inputs.segments, again.segments)
        assert torch.equal(ours.use(task.name)(task.name, inputs), theirs.use(task.name)(task.name, again))


def test_a_saved_model_has_a_pooler_only_where_ours_had_one(folders, tmp_path: Path):
    for pool, has_pooler in (("pooler", True), ("cls", False)):
        encoder, model = load(folders["bert"], [make_task(pool=pool)])
        plan = SharingPlan((("heads.*", "task"), ("*", "all")))
        save_model(tmp_path / pool, encoder, model.tasks, plan, initial_weights(model, plan), CONFIG)
        saved = load_model(tmp_path / pool)
        assert saved.encoder.has_pooler is has_pooler
        assert list(saved.model.canonical()) == list(model.canonical())


def test_values_a_client_kept_are_put_in_when_the_model_is_bound(folders, tmp_path: Path):
    encoder, model = load(folders["bert"], [make_task(pool="cls")])
    plan = SharingPlan((("heads.*", "client"), ("*", "all")))
    weights = initial_weights(model, plan)
    assert not any(key.scope.startswith("client:") for key in weights)
    save_model(tmp_path, encoder, model.tasks, plan, weights, CONFIG)
    own = {
        Key("client:c7", "heads.single.weight"): torch.zeros(2, 32),
        Key("client:c7", "heads.single.bias"): torch.tensor([2.0, 3.0]),
    }
    bound = load_model(tmp_path).bind("c7", own)
    logits = bound.use("single")("single", encode(encoder.tokenizer, make_task(), [("good",)]))
    assert logits.tolist() == [[2.0, 3.0]]


def test_a_folder_without_a_finished_model_says_so(tmp_path: Path):
    with pytest.raises(ModelError, match="holds no finished model"):
        load_model(tmp_path)


def test_one_tensor_may_be_saved_under_two_keys(tmp_path: Path):
    # The best head of a task is the current one in the round that made it the best.
    value, whole = torch.tensor([1.0, 2.0]), torch.arange(4.0)
    key, part = Key("task:a", "heads.a.bias"), Key("all", "part")
    save_tensors(tmp_path / "t.safetensors", {"weights": {key: value, part: whole[2:]}, "best_head.a": {key: value}})
    slots = load_tensors(tmp_path / "t.safetensors")
    assert {slot: {tuple(key): v.tolist() for key, v in values.items()} for slot, values in slots.items()} == {
        "weights": {("task:a", "heads.a.bias"): [1.0, 2.0], ("all", "part"): [2.0, 3.0]},
        "best_head.a": {("task:a", "heads.a.bias"): [1.0, 2.0]},
    }


def test_a_file_of_tensors_is_one_that_safetensors_reads_and_its_digest_is_told(tmp_path: Path):
    dtypes = (torch.bool, torch.float16, torch.float64, torch.int64, torch.bfloat16, torch.float32)
    shapes = ((), (0, 3), (3,), (2, 5))
    values = {
        Key("all", f"{dtype} {shape}"): torch.ones(shape).cumsum(0).to(dtype) if shape else torch.tensor(1).to(dtype)
        for dtype in dtypes
        for shape in shapes
    }
    path = tmp_path / "t.safetensors"
    assert save_tensors(path, {"weights": values}) == hashlib.sha256(path.read_bytes()).hexdigest()
    back = load_tensors(path)["weights"]
    assert back.keys() == values.keys()
    for key, value in values.items():
        assert (back[key].dtype, back[key].shape) == (value.dtype, value.shape)
        assert torch.equal(back[key], value)


def test_parameters_are_counted_by_scope_and_by_layer(folders):
    _, model = load(folders["bert"], [make_task("a", pool="cls"), make_task("b", outputs=1, pool="cls")])
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*.bias", "task"), ("*", "all")))
    weights = initial_weights(model, plan)
    # Biases of a layer: q, k, v, output and norm 32 each, 48 up, 32 down, norm 32: 7 * 32 + 48 = 272 in 8 tensors.
    # A head: 32 * 2 + 2 = 66, and with one output 33.
    counts = {entry.scope: (entry.parameters, entry.tensors) for entry in scope_counts(weights)}
    assert counts["task:a"] == (272 + 66, 10)
    assert counts["task:b"] == (272 + 33, 10)
    assert sum(parameters for parameters, _ in counts.values()) == count_parameters(weights)
    layers = {entry.layer: entry for entry in layer_counts(model, plan)}
    assert list(layers) == ["embeddings", "encoder.layer.0", "encoder.layer.1", "heads.a", "heads.b"]
    assert layers["encoder.layer.1"].level == "all, task"
    assert layers["encoder.layer.0"].parameters == 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32
    assert layers["heads.b"].parameters == 33
