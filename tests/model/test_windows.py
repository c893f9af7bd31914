"""A text's vector is what its windows' vectors come to, by every path through every encoder."""

import copy
import math

import numpy as np
import pytest
import torch

from fedmtl.config import ModelConfig
from fedmtl.config.file import config_from
from fedmtl.errors import ConfigError
from fedmtl.model.encoder import load_encoder
from fedmtl.model.multitask import BoundModel, Inputs, build_model, pair_features, wants_pooler
from fedmtl.model.windows import pool_windows
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import TextShard, collate
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task, Windows
from fedmtl.tasks.tokens import encode_texts
from fedmtl.training.local import predict_together, task_loss, to_tensors
from model.compiled import compute_by
from model.tiny import KINDS, make_task, write_encoder

CPU = torch.device("cpu")
LENGTH = 8
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
# Five windows of six pieces, one, and two.
TEXTS = [
    "the plot is not dull and the film was very good how long was it",
    "a fine film",
    "what a great plot it was not",
]
OTHERS = ["good", "the same film and the same dull plot is the same", "a question"]
POOLS = ("mean", "max", "attention")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {kind: write_encoder(kind, root / kind) for kind in KINDS}


def windowed(name="single", *, pool="mean", **keys):
    return make_task(name, windows=Windows(stride=3, pool=pool), **keys)


def build(folder, *tasks, **keys):
    by_name = {task.name: task for task in tasks}
    config = ModelConfig(server_model=str(folder), max_length=LENGTH, **keys)
    encoder = load_encoder(config, 0, wants_pooler(by_name))
    model = build_model(encoder, by_name, 0, config)
    for task in tasks:
        if task.windows is not None and task.windows.learns:
            torch.nn.init.normal_(model.windows._modules[task.name]["windows"].weight, generator=seeded())
    return encoder, model


def seeded():
    return torch.Generator().manual_seed(1)


def batch(encoder, task, rows=(0, 1, 2)):
    texts = (TEXTS, OTHERS) if task.is_pair else (TEXTS,)
    tokens = encode_texts(task, texts, encoder.tokenizer, LENGTH)
    shard = TextShard(tokens, np.array([0, 1, 1]), np.arange(3))
    return shard, to_tensors(collate(shard, np.array(rows), encoder.tokenizer.pad_token_id, None), CPU)


def by_hand(model, task, inputs):
    """Every window's vector by itself, those of a text pooled, then the head."""
    vectors = torch.cat(
        [
            model.pool(task.name, *model.encode(task.name, Inputs(*(part[row : row + 1, :real] for part in parts))))
            for parts in [(inputs.ids, inputs.mask, inputs.segments)]
            for row, real in enumerate(inputs.mask.sum(1).tolist())
        ]
    )
    rows = torch.arange(len(vectors))[:, None] if inputs.windows is None else inputs.windows
    found = []
    for of_text in rows:
        these = vectors[of_text[of_text >= 0]]
        if task.windows.pool == "max":
            found.append(these.amax(0))
        elif task.windows.pool == "mean":
            found.append(these.sum(0) / len(these))
        else:
            weight = model.windows._modules[task.name]["windows"].weight[0]
            shares = torch.exp(these @ weight) / torch.exp(these @ weight).sum()
            found.append((shares[:, None] * these).sum(0))
    stacked = torch.stack(found)
    return model.outputs(task.name, pair_features(*stacked.chunk(2)) if task.is_dual else stacked)


def test_pooling_by_hand():
    # Two clients of three rows; the first text has two rows, the second one.
    vectors = torch.tensor([[[1.0, 2.0], [3.0, -2.0], [5.0, 5.0]], [[0.0, 1.0], [8.0, 0.0], [2.0, 2.0]]])
    windows = torch.tensor([[[0, 1], [2, -1]], [[2, 0], [1, -1]]])
    mean, largest = (pool_windows(vectors, windows, pool) for pool in ("mean", "max"))
    assert mean.tolist() == [[[2, 0], [5, 5]], [[1, 1.5], [8, 0]]]
    assert largest.tolist() == [[[3, 2], [5, 5]], [[2, 2], [8, 0]]]
    # Products with (ln 3, 0) are ln 3 and 3 ln 3: their shares are 3 / 30 and 27 / 30.
    weight = torch.tensor([[[math.log(3.0), 0.0]], [[0.0, 0.0]]])
    weighed = pool_windows(vectors, windows, "attention", weight)
    torch.testing.assert_close(weighed[0], torch.tensor([[0.1 * 1 + 0.9 * 3, 0.1 * 2 - 0.9 * 2], [5.0, 5.0]]))
    # A weight of zero is the mean.
    torch.testing.assert_close(weighed[1], mean[1])


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_attention_sum_to_one_whatever_is_filled_up(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(7, 4, generator=generator)
    vectors[:, 0] = 1.0
    windows = torch.tensor([[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, -1, -1]])
    pooled = pool_windows(vectors, windows, "attention", 50 * torch.randn(1, 4, generator=generator))
    # The first column is one in each window, and stays one.
    torch.testing.assert_close(pooled[:, 0], torch.ones(3))
    assert torch.equal(pooled[1], vectors[4])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("code", ["kernels", "torch", "autograd"])
def test_bert_is_computed_as_its_windows_one_by_one(folders, code, pool, monkeypatch):
    compute_by(code, monkeypatch)
    if code == "autograd":
        monkeypatch.setattr("fedmtl.model.multitask.MultiTaskModel.writes_gradients", False)
    task = make_task(windows=Windows(3, pool=pool), pool="mean")
    encoder, model = build(folders["bert"], task)
    model = model.double()
    _, (inputs, labels) = batch(encoder, task)
    assert inputs.windows.tolist() == [[0, 1, 2, 3, 4], [5, -1, -1, -1, -1], [6, 7, -1, -1, -1]]
    plain = copy.deepcopy(model)
    plain.layout = None
    fast, slow = model("single", inputs), by_hand(plain, task, inputs)
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)
    ours, theirs = gradients(task, model, fast, labels), gradients(task, plain, slow, labels)
    assert ours.keys() == theirs.keys()
    assert ("windows.single.windows.weight" in ours) == (pool == "attention")
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-12, rtol=0, msg=name)


def gradients(task, model, outputs, labels):
    model.zero_grad()
    task_loss(task, outputs, labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [{}, {"text": ("a", "b"), "pair": "dual"}, {"text": ("a", "b")}], ids=str)
def test_every_encoder_pools_windows(folders, kind, keys):
    for pool in POOLS:
        task = windowed(pool=pool, **keys)
        encoder, model = build(folders[kind], task)
        _, (inputs, _) = batch(encoder, task)
        with torch.inference_mode():
            torch.testing.assert_close(model("single", inputs), by_hand(model, task, inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "keys", [{"lora": {"rank": 2}}, {"adapters": {"kind": "pals", "size": 8, "heads": 2}}], ids=str
)
def test_windows_go_with_what_is_added_to_an_encoder(folders, keys):
    task = windowed(pool="attention")
    encoder, model = build(folders["bert"], task, **keys)
    _, (inputs, _) = batch(encoder, task)
    with torch.inference_mode():
        torch.testing.assert_close(model("single", inputs), by_hand(model, task, inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pool", POOLS)
def test_one_window_is_no_windows_bit_for_bit(folders, pool):
    task, plain = windowed(pool=pool), make_task()
    encoder, model = build(folders["bert"], task)
    _, without = build(folders["bert"], plain)
    texts = ([TEXTS[1], "a good plot", "dull"],)
    outputs = []
    for each, of in ((task, model), (plain, without)):
        shard = TextShard(encode_texts(each, texts, encoder.tokenizer, LENGTH), np.array([0, 1, 0]), np.arange(3))
        inputs, labels = to_tensors(collate(shard, np.arange(3), of.pad_id, None), CPU)
        outputs.append((of("single", inputs), gradients(each, of, of("single", inputs), labels)))
    (ours, grown), (theirs, expected) = outputs
    assert torch.equal(ours, theirs)
    assert grown.keys() == expected.keys()
    assert all(torch.equal(grown[name], expected[name]) for name in expected)


def bound(model, tasks):
    return BoundModel(model, PLAN, tasks, "", initial_weights(model, PLAN), read=True)


def test_what_is_learnt_is_shared_as_the_head_is(folders):
    _, model = build(folders["bert"], windowed(pool="attention"), windowed("other", pool="max"))
    keys = PLAN.keys(model.canonical(), ["single", "other"], "")
    assert keys["single"]["heads.single.windows.weight"] == Key("task:single", "heads.single.windows.weight")
    assert not any("windows" in name for name in keys["other"])
    # It starts at zero, which is the mean.
    encoder = load_encoder(ModelConfig(server_model=str(folders["bert"]), max_length=LENGTH), 0, None)
    fresh = build_model(encoder, {"single": windowed(pool="attention")}, 0, ModelConfig())
    assert not fresh.windows._modules["single"]["windows"].weight.any()


def test_tasks_that_pool_otherwise_have_vectors_of_their_own_in_one_pass(folders):
    tasks = [windowed("one"), windowed("two", pool="max"), windowed("three", pool="attention"), windowed("four")]
    encoder, model = build(folders["bert"], *tasks)
    shard, (inputs, _) = batch(encoder, tasks[0])
    outputs, _ = predict_together(
        bound(model, [task.name for task in tasks]), [task.name for task in tasks], shard, 3, CPU
    )
    for task in tasks:
        with torch.inference_mode():
            expected = model(task.name, inputs).numpy()
        np.testing.assert_allclose(outputs[task.name], expected, atol=1e-5)


def test_answers_do_not_depend_on_the_batch_a_text_is_in(folders):
    task = windowed(pool="attention")
    encoder, model = build(folders["bert"], task)
    shard, _ = batch(encoder, task)
    whole, loss = predict_together(bound(model, ["single"]), ["single"], shard, 3, CPU)
    alone, again = predict_together(bound(model, ["single"]), ["single"], shard, 1, CPU)
    np.testing.assert_allclose(whole["single"], alone["single"], atol=1e-5)
    assert loss["single"] == pytest.approx(again["single"], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_has_its_state_from_its_most_central_window(folders, kind):
    names = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("X",), windows=Windows(stride=2))
    encoder, model = build(folders[kind], names)
    tokens = encode_texts(names, (["a the film plot is was dull", "fine"],), encoder.tokenizer, 5)
    labels = Sequences.of([[0, 1, 2, 0, 1, 2, 0], [1]], np.int64)
    inputs, _ = to_tensors(collate(TextShard(tokens, labels, np.arange(2)), np.arange(2), model.pad_id, None), CPU)
    # Windows of three words, at 0, 2 and 4: the last word of one is the first of the next, and as central in both.
    hidden, _, _ = model.encode("names", inputs)
    expected = [
        hidden[0, 1],
        hidden[0, 2],
        hidden[0, 3],
        hidden[1, 2],
        hidden[1, 3],
        hidden[2, 2],
        hidden[2, 3],
        hidden[3, 1],
    ]
    with torch.inference_mode():
        torch.testing.assert_close(
            model("names", inputs), model.outputs("names", torch.stack(expected)), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_length": 64, "windows": {"length": 32}}, "model.windows.length: found 32, model.max_length is 64"),
        ({"max_length": 64, "windows": {"stride": 65}}, "model.windows.stride: found 65, a window has 64 tokens"),
    ],
)
def test_windows_that_contradict_a_length_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        config_from({"tasks": {"sst2": None}, "model": given})


def test_the_length_of_windows_is_that_of_a_sequence():
    config = config_from({"tasks": {"sst2": None}, "model": {"windows": {"length": 48}}})
    assert config.model.max_length == 48
