"""Models without some of their attention heads."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from compress.test_structured import PLAN, TASKS, answers, equal
from fedmtl.compress.prune import cut, remaining_columns, write_cut
from fedmtl.errors import ModelError
from fedmtl.export.hf import export_hf
from fedmtl.export.onnx import export_onnx
from fedmtl.model.saved import SavedModel, load_model
from fedmtl.predict.onnx import compute, open_onnx
from fedmtl.sharing.plan import Key, SharingPlan, move
from fedmtl.sharing.weights import count_parameters, initial_weights
from model.tiny import LENGTH, PAIRS, SINGLES, load, make_tokenizer

# Four heads of 8 columns, in two layers 32 wide.
SIZE, WIDTH = 8, 32
QUERY, VALUE, OUT = (f"encoder.layer.{{}}.attention.{part}" for part in ("self.query", "self.value", "output.dense"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), make_tokenizer("bert")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = AutoModel.from_config(config)
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def saved(folder):
    encoder, model = load(folder, TASKS)
    return SavedModel(model, encoder, model.tasks, PLAN, initial_weights(model, PLAN), LENGTH)


def columns(*heads):
    return [column for head in heads for column in range(head * SIZE, (head + 1) * SIZE)]


def silence(saved, layer, head, *, by):
    """A head that tells nothing of the text, however sharply it looks; with `by` value its bias still comes through."""
    saved.weights[Key("all", f"{QUERY.format(layer)}.weight")][columns(head)] = 9.0
    if by == "out":
        saved.weights[Key("all", f"{OUT.format(layer)}.weight")][:, columns(head)] = 0.0
    else:
        saved.weights[Key("all", f"{VALUE.format(layer)}.weight")][columns(head)] = 0.0


@pytest.mark.parametrize("by", ["out", "value"])
def test_without_silent_heads_the_model_answers_the_same(saved, by):
    # Another two of four in each layer.
    for layer, head in ((0, 0), (0, 2), (1, 1), (1, 2)):
        silence(saved, layer, head, by=by)
    assert remaining_columns(saved, 0, 2).tolist() == columns(1, 3)
    assert remaining_columns(saved, 1, 2).tolist() == columns(0, 3)
    smaller = cut(saved, 0.0, 0, 0.5)
    assert (smaller.model.layout.num_heads, smaller.model.layout.head_size) == (2, SIZE)
    assert equal(saved, smaller, atol=1e-6, rtol=0)
    # A head is 8 rows and biases of q, k and v, and 8 columns out: 3 * 8 * 33 + 32 * 8 = 1048; two in each layer go.
    assert count_parameters(saved.weights) - count_parameters(smaller.weights) == 4 * 1048


def test_heads_go_by_the_norm_of_what_they_map(saved):
    value, out = (torch.zeros(WIDTH, WIDTH, dtype=torch.float32) for _ in range(2))
    # One column each: |W_o W_v| = 1 * 6, 3 * 3, 2 * 4 and, large as both are, 0: they do not meet.
    for head, (into, off) in enumerate([(1, 6), (3, 3), (2, 4), (50, 50)]):
        value[head * SIZE, head], out[head, head * SIZE + (head == 3)] = into, off
    saved.weights[Key("all", f"{VALUE.format(0)}.weight")] = value
    saved.weights[Key("all", f"{OUT.format(0)}.weight")] = out
    assert [remaining_columns(saved, 0, count).tolist() for count in (1, 2, 3)] == [
        columns(1),
        columns(1, 2),
        columns(0, 1, 2),
    ]


def test_keeping_all_heads_changes_no_bit(saved):
    same = cut(saved, 0.0, 0, 0.0)
    assert same.weights.keys() == saved.weights.keys()
    assert all(torch.equal(value, saved.weights[key]) for key, value in same.weights.items())
    assert same.encoder.module.config.to_dict() == saved.encoder.module.config.to_dict()


def test_the_fast_path_answers_as_transformers_module(saved):
    smaller = cut(saved, 0.5, 0, 0.75)
    fast = answers(smaller)
    smaller.model.layout = None
    for ours, theirs in zip(fast, answers(smaller), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_what_is_written_is_read_to_the_same_bits_and_can_be_cut_again(saved, tmp_path):
    smaller = cut(saved, 0.0, 0, 0.25)
    read = load_model(write_cut(smaller, tmp_path).model)
    assert all(torch.equal(value, read.weights[key]) for key, value in smaller.weights.items())
    assert equal(read, smaller, atol=0, rtol=0)
    # A third of the three that are left.
    again, at_once = cut(read, 0.0, 0, 1 / 3), cut(saved, 0.0, 0, 0.5)
    assert again.model.layout.num_heads == 2
    assert equal(again, at_once, atol=1e-5)


@pytest.mark.slow
def test_the_onnx_file_answers_the_same(saved, tmp_path):
    for module in ("onnxruntime", "onnxscript"):
        pytest.importorskip(module)
    smaller = cut(saved, 0.5, 1, 0.25)
    model = open_onnx(export_onnx(smaller, smaller.bind(), tmp_path / "model.onnx"), threads=1)
    for (name, task), ours in zip(smaller.tasks.items(), answers(smaller), strict=True):
        found = compute(model, [name], PAIRS if task.is_pair else SINGLES)[name]
        assert abs(found - ours.numpy()).max() < 1e-4


def test_tasks_with_layers_of_their_own_lose_the_same_heads(saved):
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.0.attention.output.*", "task"), ("*", "all")))
    weights = move(saved.weights, PLAN, plan, list(saved.tasks))
    # Silent for one task and loud for the other: a head goes by both together.
    weights[Key("task:two", f"{OUT.format(0)}.weight")][:, columns(2)] = 0.0
    weights[Key("task:score", f"{OUT.format(0)}.weight")][:, columns(2)] = 9.0
    apart = replace(saved, plan=plan, weights=weights)
    assert set(columns(2)) < set(remaining_columns(apart, 0, 2).tolist())
    assert len(answers(cut(apart, 0.0, 0, 0.5))) == 2


def test_what_cannot_be_done_is_told(saved):
    with pytest.raises(ModelError, match=r"--heads: found 0\.95, which leaves none of 4 heads; write a smaller share"):
        cut(saved, 0.0, 0, 0.95)
    with pytest.raises(ModelError, match=r"--heads: found 0\.1, which takes none of 4 heads; write a larger share"):
        cut(saved, 0.0, 0, 0.1)


def test_heads_that_were_removed_leave_as_heads_of_zeros(saved, tmp_path):
    smaller = cut(saved, 0.0, 0, 0.5)
    folder = export_hf(smaller, smaller.bind(), tmp_path).folders["two"]
    classifier, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    with torch.no_grad():
        logits = classifier(**tokenizer([text for (text,) in SINGLES], padding=True, return_tensors="pt")).logits
    assert torch.allclose(logits, answers(smaller)[0], atol=1e-5)
