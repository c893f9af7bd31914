import copy

import pytest
import torch
from transformers import BertConfig

from fedmtl.model.bert.autograd import pooled_vectors
from fedmtl.model.bert.layout import Packed, bert_layout, build_encoder, keep_heads, no_masks, pack
from fedmtl.model.encoder import describe_encoder
from fedmtl.model.multitask import build_model
from model.compiled import compute_by
from model.tiny import KINDS, PAIRS, SINGLES, encode, load, make_task, make_tokenizer
from same_masks import Recorder, replayed


@pytest.fixture(params=["kernels", "torch", "autograd"], autouse=True)
def code(request, monkeypatch):
    """Every test is for `bert.cpu`, compiled and by torch, and for `bert.autograd`, which other devices use."""
    compute_by(request.param, monkeypatch)
    if request.param == "autograd":
        monkeypatch.setattr("fedmtl.model.multitask.MultiTaskModel.writes_gradients", False)
    return request.param


POOLS = ("pooler", "cls", "mean")
TASKS = {
    "single": (make_task("single"), SINGLES),
    "cross": (make_task("cross", text=("a", "b")), PAIRS),
    "dual": (make_task("dual", text=("a", "b"), pair="dual"), PAIRS),
}


def build(kind, pool, dtype, *, dropout=0.0, layers=3, plain=False, kept=4):
    """A model with weights of ordinary size everywhere, and a batch with padding in it."""
    tokenizer = make_tokenizer("bert")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=40, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, pad_token_id=tokenizer.pad_token_id, attn_implementation="eager",
    )  # fmt: skip
    keep_heads(config, kept)
    module = build_encoder(config)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    task, rows = TASKS[kind]
    task = make_task(task.name, text=task.text, pair=task.pair, pool=pool)
    encoder = describe_encoder(module, tokenizer, "bert", has_pooler=True)
    model = build_model(encoder, {task.name: task}, 0, plain=plain).to(dtype)
    inputs = encode(tokenizer, task, rows)
    # Positions of both kinds of segment, and rows that end early.
    assert (inputs.mask == 0).any()
    inputs.segments[:, 2:] = 1
    return model, inputs


def gradients(model, outputs):
    outputs.sin().sum().backward()
    # A parameter that is not in the outputs has none; a vocabulary of unused rows has zeros.
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, inputs, task, atol, masks=None):
    """Outputs and gradients of `bert.autograd` are those of transformers' module."""
    plain = copy.deepcopy(model)
    plain.layout = None
    fast = model(task, inputs)
    if masks is None:
        slow = plain(task, inputs)
    else:
        with replayed(masks.passes[-1], inputs.mask):
            slow = plain(task, inputs)
    torch.testing.assert_close(fast, slow, atol=atol, rtol=0)
    ours, theirs = gradients(model, fast), gradients(plain, slow)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", TASKS)
def test_vectors_and_gradients_are_those_of_the_module(kind, pool):
    model, inputs = build(kind, pool, torch.float64)
    assert model.layout is not None
    assert_same(model, inputs, kind, atol=1e-12)


@pytest.mark.parametrize("pool", POOLS)
def test_in_single_precision_they_differ_by_rounding_only(pool):
    model, inputs = build("cross", pool, torch.float32)
    assert_same(model, inputs, "cross", atol=2e-5)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", TASKS)
def test_with_the_same_dropout_masks_they_are_the_same(kind, pool):
    model, inputs = build(kind, pool, torch.float64, dropout=0.2)
    model.train()
    calm = model.eval()(kind, inputs)
    model.train()
    recorder = model.draw_masks = Recorder()
    assert_same(model, inputs, kind, atol=1e-12, masks=recorder)
    # embeddings, then attention, its output and the layer's output in each of three layers
    assert list(recorder.passes[0]) == [
        "embeddings",
        *(f"{n}.{site}" for n in range(3) for site in ("attention", "attention.output", "output")),
    ]
    assert (model(kind, inputs) - calm).abs().max() > 1e-3


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_with_fewer_heads_they_are_those_of_the_module(pool, kept):
    model, inputs = build("cross", pool, torch.float64, dropout=0.2, kept=kept)
    assert (model.layout.num_heads, model.layout.head_size) == (kept, 8)
    assert_same(model, inputs, "cross", atol=1e-12)
    model.zero_grad()
    recorder = model.train().draw_masks = Recorder()
    assert_same(model, inputs, "cross", atol=1e-12, masks=recorder)


def test_one_layer_is_enough():
    model, inputs = build("single", "cls", torch.float64, layers=1)
    assert_same(model, inputs, "single", atol=1e-12)


@pytest.mark.parametrize("pool", POOLS)
def test_padding_changes_nothing(pool):
    model, inputs = build("single", pool, torch.float64)
    values = {name: parameter.detach() for name, parameter in model.encoder.named_parameters()}

    def vectors(rows):
        width = int(inputs.mask[rows].sum(1).max())
        parts = (part[rows, :width] for part in (inputs.ids, inputs.mask, inputs.segments))
        return pooled_vectors(values, model.layout, pack(*parts), pool, no_masks, None)

    together = vectors(list(range(len(inputs.ids))))
    for row in range(len(inputs.ids)):
        torch.testing.assert_close(vectors([row])[0], together[row], atol=1e-12, rtol=0)


def test_a_batch_that_is_not_packed_gives_the_same(code, monkeypatch):
    if code != "autograd":
        pytest.skip("on a CPU all batches are packed")
    model, inputs = build("cross", "mean", torch.float64)
    packed = model("cross", inputs)
    size, width = inputs.ids.numel(), inputs.ids.shape[1]
    places = torch.arange(size)
    whole = Packed(
        inputs.ids.reshape(-1), inputs.segments.reshape(-1), places % width, inputs.mask, places[::width], places,
        places,
    )  # fmt: skip
    monkeypatch.setattr("fedmtl.model.multitask.pack", lambda *_: whole)
    torch.testing.assert_close(model("cross", inputs), packed, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_plain_bert_is_computed_by_our_own_code(folders, kind):
    _, model = load(folders[kind], [make_task(pool="cls")])
    assert (model.layout is not None) == (kind == "bert")


def test_other_activations_added_parts_and_hooks_leave_it_to_the_module(folders):
    _, model = load(folders["bert"], [make_task(pool="cls")])
    module = model.encoder
    assert bert_layout(module) is not None
    hook = module.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert bert_layout(module) is None
    hook.remove()
    module.adapter = torch.nn.Linear(2, 2)
    assert bert_layout(module) is None
    del module.adapter
    module.config.hidden_act = "relu"
    assert bert_layout(module) is None


def test_plain_can_be_asked_for():
    model, _ = build("single", "cls", torch.float32, plain=True)
    assert model.layout is None
