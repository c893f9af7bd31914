"""A head's hidden layer: what it computes, how its values are called, and what else has to know of it."""

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
)

from fedmtl.config import ModelConfig, TaskConfig
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import load_model, save_model
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.task import HiddenLayer

from .tiny import PAIRS, SINGLES, WIDTH, encode, load, make_task

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
RELU = HiddenLayer(dropout=0.0)


def set_values(layer, weight, bias):
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)


@pytest.mark.parametrize(
    ("kind", "family", "activation", "layers"),
    [
        ("distilbert", DistilBertForSequenceClassification, "relu", lambda m: (m.pre_classifier, m.classifier)),
        ("bert", BertForSequenceClassification, "tanh", lambda m: (m.bert.pooler.dense, m.classifier)),
    ],
)
def test_the_classifier_of_transformers_is_a_hidden_layer_on_the_first_token(folders, kind, family, activation, layers):
    task = make_task(pool="cls", labels=("a", "b", "c"), head=HiddenLayer(activation=activation))
    encoder, ours = load(folders[kind], [task])
    theirs = AutoModelForSequenceClassification.from_pretrained(folders[kind], num_labels=3).eval()
    assert type(theirs) is family
    hidden, last = layers(theirs)
    torch.manual_seed(0)
    # As large as trained ones: near zero every activation but ReLU is a straight line.
    for layer, mine in ((hidden, ours.hidden["single"]), (last, ours.heads["single"])):
        set_values(mine, 0.2 * torch.randn_like(mine.weight), torch.randn_like(mine.bias))
        set_values(layer, mine.weight, mine.bias)
    inputs = encode(encoder.tokenizer, task, SINGLES)
    expected = theirs(input_ids=inputs.ids, attention_mask=inputs.mask).logits
    found = ours("single", inputs)
    assert found.std(0).min() > 0.01  # the texts are told apart
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_what_a_hidden_layer_computes_and_what_its_values_are_called(folders):
    task = make_task(pool="cls", head=HiddenLayer(2, "relu", 0.0))
    _, model = load(folders["bert"], [task])
    assert list(model.canonical())[-4:] == [
        "heads.single.weight", "heads.single.bias", "heads.single.hidden.weight", "heads.single.hidden.bias",
    ]  # fmt: skip
    vector = torch.zeros(1, WIDTH)
    vector[0, :2] = torch.tensor([1.0, 2.0])
    into = torch.zeros(2, WIDTH)
    into[:, :2] = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    set_values(model.hidden["single"], into, torch.tensor([0.5, 0.5]))
    set_values(model.heads["single"], torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0.0, 0.25]))
    # Hidden: 1 + 2 + 0.5 = 3.5 and -1 + 0.5 < 0, which ReLU makes 0; outputs: 2 x 3.5 and 0.25.
    assert model.head("single", vector).tolist() == [[7.0, 0.25]]


def test_a_hidden_layer_begins_the_same_whatever_was_drawn_before(folders):
    tasks = [make_task("a", head=RELU), make_task("b", head=RELU)]
    torch.manual_seed(1)
    _, first = load(folders["bert"], tasks)
    torch.manual_seed(2)
    _, second = load(folders["bert"], tasks[:1])
    assert torch.equal(first.hidden["a"].weight, second.hidden["a"].weight)
    assert not torch.equal(first.hidden["a"].weight, first.hidden["b"].weight)
    assert abs(first.hidden["a"].weight.std() - 0.02) < 0.002
    assert not first.hidden["a"].bias.any()


def test_a_task_without_one_begins_as_it_did_beside_a_task_with_one(folders):
    _, alone = load(folders["bert"], [make_task("plain")])
    _, beside = load(folders["bert"], [make_task("deep", head=RELU), make_task("plain")])
    assert torch.equal(alone.heads["plain"].weight, beside.heads["plain"].weight)
    assert not any("hidden" in name for name in alone.canonical() if name.startswith("heads."))


def test_dropout_behind_the_hidden_layer_holds_in_training_only(folders):
    task = make_task(head=HiddenLayer(16, "gelu", 0.5))
    _, model = load(folders["bert"], [task])
    vectors = torch.ones(2, WIDTH)
    assert torch.equal(model.eval().head("single", vectors), model.head("single", vectors))
    assert not torch.equal(model.train().head("single", vectors), model.head("single", vectors))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_dual_pair_has_its_features_in_front_of_the_hidden_layer(folders, kind):
    task = make_task(text=("a", "b"), pair="dual", pool="mean", kind=kind, head=HiddenLayer(8))
    encoder, model = load(folders["bert"], [task])
    assert model.hidden["single"].weight.shape == (8, 4 * WIDTH + 1)
    assert model.heads["single"].weight.shape[1] == 8
    # Zeros, as a head on the cosine begins with, would let no gradient through to the hidden layer.
    assert bool(model.heads["single"].weight.all())
    model("single", encode(encoder.tokenizer, task, PAIRS)).sum().backward()
    assert model.hidden["single"].weight.grad.abs().max() > 0


@pytest.mark.parametrize("mode", ["adapters", "last_linear", "full_model"])
def test_lora_wraps_a_hidden_layer_where_it_wraps_heads(folders, mode):
    task = make_task(pool="cls", head=RELU)
    encoder, model = load(folders["bert"], [task], lora={"rank": 2, "mode": mode})
    names = [name for name in model.canonical() if name.startswith("heads.")]
    wrapped = [f"heads.single.{part}lora_{side}.weight" for part in ("", "hidden.") for side in "AB"]
    plain = [f"heads.single.{part}{leaf}" for part in ("", "hidden.") for leaf in ("weight", "bias")]
    assert sorted(names) == sorted(plain + (wrapped if mode != "adapters" else []))
    assert model("single", encode(encoder.tokenizer, task, SINGLES)).shape == (4, 2)


def test_a_saved_model_has_its_hidden_layer_again(folders, tmp_path):
    task = make_task(pool="cls", head=HiddenLayer(5, "tanh", 0.25))
    encoder, model = load(folders["distilbert"], [task])
    weights = initial_weights(model, PLAN)
    key = Key("task:single", "heads.single.hidden.weight")
    weights[key] = torch.randn(5, WIDTH)
    save_model(tmp_path / "model", encoder, {"single": task}, PLAN, weights, ModelConfig(server_model="x"))
    saved = load_model(tmp_path / "model")
    assert saved.tasks == {"single": task}
    assert torch.equal(saved.weights[key], weights[key])
    inputs = encode(encoder.tokenizer, task, SINGLES)
    bound = BoundModel(model, PLAN, ["single"], "", weights)
    assert torch.equal(saved.bind().use("single")("single", inputs), bound.use("single")("single", inputs))


def test_a_head_of_nothing_in_a_config_is_a_hidden_layer_with_all_defaults():
    assert TaskConfig(head={}).head.model_dump() == {"hidden": None, "activation": "relu", "dropout": 0.1}
    assert TaskConfig().head is None
