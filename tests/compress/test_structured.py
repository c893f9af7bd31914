from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fedmtl.compress.prune import cut, remaining_neurons, rules_left, write_cut
from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.export.hf import export_hf
from fedmtl.model.encoder import load_encoder
from fedmtl.model.families import FAMILIES
from fedmtl.model.saved import SavedModel, load_model
from fedmtl.sharing.plan import Key, SharingPlan, move
from fedmtl.sharing.weights import count_parameters, initial_weights
from model.tiny import LENGTH, PAIRS, SINGLES, encode, load, make_task, write_encoder

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
TASKS = [
    make_task("two", pool="cls", labels=("no", "yes")),
    make_task("score", pool="cls", kind="regression", text=("a", "b"), score_range=(0.0, 1.0)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder("bert", tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def saved(folder):
    encoder, model = load(folder, TASKS)
    return SavedModel(model, encoder, model.tasks, PLAN, initial_weights(model, PLAN), LENGTH)


def silence(saved, neurons):
    """Dead neurons: what leads out of them is zero, and what leads in is the largest there is."""
    for layer in range(2):
        inner = saved.weights[Key("all", f"encoder.layer.{layer}.intermediate.dense.weight")]
        inner[neurons] = 9.0
        saved.weights[Key("all", f"encoder.layer.{layer}.output.dense.weight")][:, neurons] = 0.0


def answers(saved):
    bound = saved.bind()
    with torch.no_grad():
        return [
            bound.use(name)(name, encode(saved.encoder.tokenizer, task, PAIRS if task.is_pair else SINGLES))
            for name, task in saved.tasks.items()
        ]


def equal(first, second, **bounds):
    return all(torch.allclose(a, b, **bounds) for a, b in zip(answers(first), answers(second), strict=True))


def test_without_dead_neurons_the_model_answers_the_same(saved):
    # Of 48 neurons a quarter, 12, go: those are the dead ones.
    dead = [0, 1, 5, 7, 11, 13, 20, 21, 30, 40, 46, 47]
    silence(saved, dead)
    assert remaining_neurons(saved, 1, 36).tolist() == [number for number in range(48) if number not in dead]
    smaller = cut(saved, 0.25, 0)
    assert smaller.encoder.module.config.intermediate_size == 36
    assert equal(saved, smaller, atol=1e-6)
    # A neuron is a row in, its bias, and a column out: 12 * (32 + 1 + 32) in each of two layers.
    assert count_parameters(saved.weights) - count_parameters(smaller.weights) == 2 * 12 * 65


def test_what_is_written_is_a_plain_bert_and_the_same_model(saved, tmp_path):
    smaller = cut(saved, 0.5, 1)
    folder = write_cut(smaller, tmp_path)
    read = load_model(folder.model)
    assert read.weights.keys() == smaller.weights.keys()
    assert equal(read, smaller, atol=0, rtol=0)
    assert (read.model.layout.num_layers, read.encoder.module.config.intermediate_size) == (1, 24)
    plain = AutoModel.from_pretrained(folder.encoder)
    assert plain.config.num_hidden_layers == 1
    ours = load_encoder(ModelConfig(server_model=str(folder.encoder), max_length=LENGTH), 0, values_only=True)
    assert type(ours.module).__name__ == "BertValues"
    for name, value in ours.module.named_parameters():
        assert torch.equal(value, smaller.weights[Key("all", name)])


def test_a_cut_model_exports_with_the_same_predictions(saved, tmp_path):
    smaller = cut(saved, 0.25, 1)
    written = export_hf(smaller, smaller.bind(), tmp_path).folders
    classifier = AutoModelForSequenceClassification.from_pretrained(written["two"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(written["two"])
    assert classifier.config.intermediate_size == 36
    with torch.no_grad():
        logits = classifier(
            **tokenizer(*map(list, zip(*SINGLES, strict=True)), padding=True, return_tensors="pt")
        ).logits
    assert torch.allclose(logits, answers(smaller)[0], atol=1e-4)


def test_the_top_layers_go(saved):
    smaller = cut(saved, 0.0, 1)
    names = {key.name for key in smaller.weights}
    assert "encoder.layer.0.output.dense.weight" in names
    assert not any(name.startswith("encoder.layer.1.") for name in names)


def test_tasks_with_layers_of_their_own_lose_the_same_neurons(saved):
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.0.output.*", "task"), ("*", "all")))
    weights = move(saved.weights, PLAN, plan, list(saved.tasks))
    silence(saved, [3])
    # Dead for one task and strong for the other: a neuron goes by both together.
    weights[Key("task:two", "encoder.layer.0.output.dense.weight")][:, 3] = 0.0
    weights[Key("task:score", "encoder.layer.0.output.dense.weight")][:, 3] = 9.0
    apart = replace(saved, plan=plan, weights=weights)
    assert 3 in remaining_neurons(apart, 0, 40)
    smaller = cut(apart, 0.5, 1)
    assert {key.scope for key in smaller.weights if key.name == "encoder.layer.0.output.dense.weight"} == {
        "task:two",
        "task:score",
    }
    assert len(answers(smaller)) == 2


def test_rules_of_layers_that_are_gone_go_too():
    rules = [("heads.*", "task"), ("encoder.layer.5.*", "task"), ("encoder.layer.*", "group"), ("*", "all")]
    names = ["embeddings.x", "encoder.layer.4.x", "heads.a.weight"]
    assert rules_left(rules, names) == [rules[0], rules[2], rules[3]]


def test_what_cannot_be_cut_is_told(saved, tmp_path):
    with pytest.raises(ModelError, match="--layers: found 2, but the encoder has 2"):
        cut(saved, 0.0, 2)
    personal = replace(saved, plan=SharingPlan((("heads.*", "client"), ("*", "all"))))
    with pytest.raises(ModelError, match=r"`heads\.two\.weight` stayed at the clients"):
        cut(personal, 0.5, 0)
    other = saved_of(write_encoder("modernbert", tmp_path / "modernbert"))
    with pytest.raises(
        ModelError, match=r"^--ffn: cannot be taken out of modernbert encoders; they allow --amount alone"
    ):
        cut(other, 0.5, 0)
    for kind in ("mpnet", "albert"):
        with pytest.raises(ModelError, match=f"^--heads: cannot be taken out of {kind}.*allow --ffn and --layers$"):
            cut(saved_of(write_encoder(kind, tmp_path / kind)), 0.0, 0, 0.5)
    encoder, model = load(tmp_path / "mpnet", TASKS, adapters={"size": 6, "heads": 3})
    with pytest.raises(ModelError, match="an encoder with LoRA or adapters cannot be cut"):
        cut(SavedModel(model, encoder, model.tasks, PLAN, initial_weights(model, PLAN), LENGTH), 0.5, 0)


def saved_of(folder):
    encoder, model = load(folder, TASKS)
    return SavedModel(model, encoder, model.tasks, PLAN, initial_weights(model, PLAN), LENGTH)


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "electra", "mpnet", "albert"])
def test_other_families_lose_dead_neurons_and_silent_heads_without_a_change(kind, tmp_path):
    saved = saved_of(write_encoder(kind, tmp_path / "encoder"))
    family, cuts_heads = FAMILIES[kind], "heads" in FAMILIES[kind].cuts
    layers = range(1 if kind == "albert" else 2)
    for path in (f"{family.layers}.{number}." for number in layers):
        # A quarter of 48 neurons, and the first of two heads: 16 columns, which still give their bias.
        saved.weights[Key("all", f"{path}{family.feed_out}.weight")][:, :12] = 0.0
        if cuts_heads:
            saved.weights[Key("all", f"{path}{family.attention[2]}.weight")][:16] = 0.0
    smaller = cut(saved, 0.25, 0, 0.5 if cuts_heads else 0.0)
    assert equal(saved, smaller, atol=1e-5)
    # A neuron is a row in, its bias and a column out; a head 16 rows of three with biases, and 16 columns out.
    gone = len(layers) * (12 * 65 + (3 * 16 * 33 + 32 * 16 if cuts_heads else 0))
    assert count_parameters(saved.weights) - count_parameters(smaller.weights) == gone
    folder = write_cut(smaller, tmp_path / "cut")
    assert equal(load_model(folder.model), smaller, atol=0, rtol=0)
    encoder = load_encoder(ModelConfig(server_model=str(folder.encoder), max_length=LENGTH), 0)
    for name, value in encoder.module.named_parameters():
        if "pooler" not in name:
            assert torch.equal(value, smaller.weights[Key("all", name)])


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "electra", "mpnet", "albert"])
def test_other_families_lose_their_top_layers(kind, tmp_path):
    saved = saved_of(write_encoder(kind, tmp_path / "encoder"))
    smaller = cut(saved, 0.0, 1)
    assert smaller.encoder.module.config.num_hidden_layers == 1
    task = saved.tasks["two"]
    inputs = encode(saved.encoder.tokenizer, task, SINGLES)
    # What is left gives what the whole had after its first layer.
    given = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "token_type_ids": inputs.segments}
    with torch.no_grad():
        whole = saved.bind().model.encoder(
            **{name: given[name] for name in saved.model.accepts}, output_hidden_states=True
        )
        found, _, _ = smaller.bind().use("two").encode("two", inputs)
    torch.testing.assert_close(found, whole.hidden_states[1])
