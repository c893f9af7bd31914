"""A task on words: its vectors are the module's states at the first pieces, with their gradients, by every path."""

import copy

import numpy as np
import pytest
import torch

from fedmtl.config import ModelConfig
from fedmtl.model.bert.layout import WORDS
from fedmtl.model.encoder import load_encoder
from fedmtl.model.multitask import build_model, wants_pooler
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import TextShard, collate
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import encode_texts
from fedmtl.training.local import predict_together, task_loss, to_tensors
from model.compiled import compute_by
from model.tiny import KINDS, LENGTH, make_task, write_encoder

NAMES = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("LOC", "PER"))
CPU = torch.device("cpu")
# The second is cut, and the third shorter than the others.
TEXTS = ["a dull film, and very long", " ".join(["unhappy plot"] * 12), "fine"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {kind: write_encoder(kind, root / kind) for kind in KINDS}


def build(folder, tasks=(NAMES,), **keys):
    by_name = {task.name: task for task in tasks}
    config = ModelConfig(server_model=str(folder), max_length=LENGTH, **keys)
    encoder = load_encoder(config, 0, wants_pooler(by_name))
    return encoder, build_model(encoder, by_name, 0, config)


def batch(encoder, rows=(0, 1, 2)):
    tokens = encode_texts(NAMES, (TEXTS,), encoder.tokenizer, LENGTH)
    assert tokens.words is not None
    labels = tokens.words.with_values(np.arange(len(tokens.words.values)) % 5)
    return TextShard(tokens, labels, np.arange(len(TEXTS))), np.array(rows)


def by_hand(model, inputs):
    """The head on the module's state at every place."""
    hidden, _, _ = model.encode("names", inputs)
    states = torch.stack(
        [hidden[place // hidden.shape[1], place % hidden.shape[1]] for place in inputs.places.tolist()]
    )
    return model.outputs("names", states)


def gradients(model, outputs, labels):
    model.zero_grad()
    task_loss(NAMES, outputs, labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("code", ["kernels", "torch", "autograd"])
def test_bert_is_computed_as_its_module_computes_it(folders, code, monkeypatch):
    compute_by(code, monkeypatch)
    if code == "autograd":
        monkeypatch.setattr("fedmtl.model.multitask.MultiTaskModel.writes_gradients", False)
    encoder, model = build(folders["bert"])
    assert model.pools == {"names": WORDS}
    model = model.double()
    inputs, labels = to_tensors(collate(*batch(encoder), model.pad_id, None), CPU)
    plain = copy.deepcopy(model)
    plain.layout = None
    fast, slow = model("names", inputs), by_hand(plain, inputs)
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)
    ours, theirs = gradients(model, fast, labels), gradients(plain, slow, labels)
    assert ours.keys() == theirs.keys()
    # The embeddings, two layers and the head; no pooler.
    assert len(ours) == 5 + 2 * 16 + 2
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_every_encoder_answers_for_words(folders, kind, lora):
    encoder, model = build(folders[kind], **({"lora": lora} if lora else {}))
    inputs, _ = to_tensors(collate(*batch(encoder), model.pad_id, None), CPU)
    with torch.inference_mode():
        torch.testing.assert_close(model("names", inputs), by_hand(model, inputs), atol=1e-5, rtol=0)


def test_without_another_task_the_pooler_is_not_loaded(folders):
    assert wants_pooler({"names": NAMES}) is False
    assert not any(name.startswith("pooler") for name in build(folders["bert"])[1].canonical())
    both = build(folders["bert"], (NAMES, make_task("mood", pool="pooler")))[1]
    assert both.pools == {"names": WORDS, "mood": "pooler"}


def bound(model):
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    from fedmtl.model.multitask import BoundModel

    return BoundModel(model, plan, ["names"], "", initial_weights(model, plan), read=True)


def test_outputs_have_a_row_for_every_word_in_the_order_of_the_texts(folders):
    encoder, model = build(folders["bert"])
    shard, _ = batch(encoder)
    outputs, losses = predict_together(bound(model), ["names"], shard, 2, CPU)
    rows, words = outputs["names"], shard.tokens.words
    assert rows.lengths().tolist() == [7, 24, 1]
    # `unhappy` is seven letters, so that three of its pairs fit into 24 tokens: what is cut off has zeros, which say O.
    assert (rows.values.any(axis=1) == (words.values >= 0)).all()
    assert not rows[1][-1].any()
    # The loss of a text is the mean over its words that were read.
    each = NAMES.kind_of.plain_losses(NAMES, rows.values.astype(float), shard.labels.values)
    is_there, owners = words.values >= 0, rows.owners()
    expected = sum(each[is_there & (owners == n)].mean() for n in range(3))
    assert losses["names"] == pytest.approx(expected, rel=1e-5)
    alone, _ = predict_together(
        bound(model), ["names"], TextShard(shard.tokens, shard.labels, np.array([2, 0])), 1, CPU
    )
    np.testing.assert_allclose(alone["names"][1], rows[0], atol=1e-5)
    assert alone["names"].lengths().tolist() == [1, 7]


def test_a_batch_without_any_word_moves_nothing(folders):
    encoder, model = build(folders["bert"])
    tokens = encode_texts(NAMES, (["\u200b", ""],), encoder.tokenizer, LENGTH)
    shard = TextShard(tokens, Sequences.of([[3], []], np.int64), np.arange(2))
    inputs, labels = to_tensors(collate(shard, np.arange(2), model.pad_id, None), CPU)
    loss = task_loss(NAMES, model("names", inputs), labels)
    assert (loss.item(), loss.requires_grad) == (0.0, True)
    outputs, losses = predict_together(bound(model), ["names"], shard, 2, CPU)
    # The tokenizer leaves nothing of the one word there is.
    assert outputs["names"].lengths().tolist() == [1, 0]
    assert not outputs["names"].values.any()
    assert losses["names"] == 0.0
