import copy
import pickle

import pytest
import torch

from fedmtl.config import AdaptersConfig, ModelConfig
from fedmtl.errors import ConfigError
from fedmtl.model.adapters import layer_kinds
from fedmtl.model.lora import extended_plan
from fedmtl.model.multitask import Inputs
from fedmtl.sharing.plan import SharingPlan, check_plan, layer_of, owner_task

from .tiny import PAIRS, SINGLES, encode, load, make_task

TASKS = [make_task("single", pool="cls"), make_task("pair", text=("a", "b"), pool="mean", pair="dual")]
SHAPES = [
    {"kind": "low_rank"}, {"kind": "low_rank", "share": "projections"}, {"kind": "pals"},
    {"kind": "pals", "share": "projections"}, {"kind": "pals", "share": "all"}, {"kind": "mixed"},
]  # fmt: skip


def extended(folder, seed=0, **adapters):
    return load(folder, TASKS, seed, adapters={"size": 6, "heads": 3, **adapters})


def plain_of(folder, tasks=TASKS):
    encoder, model = load(folder, tasks)
    model.layout = None
    return encoder, model


def inputs_of(encoder, task):
    return encode(encoder.tokenizer, task, PAIRS if task.is_pair else SINGLES)


def randomize(model, scale=0.5):
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, (module, leaf) in model.canonical().items():
            if name.startswith("adapters."):
                getattr(module, leaf).normal_(0, scale, generator=generator)


@pytest.mark.parametrize(
    ("kind", "shape", "wiring"),
    [
        *(("bert", shape, wiring) for shape, wiring in zip(SHAPES, ["parallel", "alternative"] * 3, strict=True)),
        ("roberta", {}, "parallel"),
        ("electra", {}, "alternative"),
        *((kind, {}, wiring) for kind in ("mpnet", "distilbert", "albert") for wiring in ("parallel", "alternative")),
    ],
    ids=str,
)
def test_fresh_adapters_change_no_bit_and_a_decoder_of_zeros_is_the_identity(folders, kind, shape, wiring):
    encoder, plain = plain_of(folders[kind])
    _, model = extended(folders[kind], wiring=wiring, **shape)
    expected = [plain(task.name, inputs_of(encoder, task)) for task in TASKS]
    assert all(
        torch.equal(model(task.name, inputs_of(encoder, task)), old) for task, old in zip(TASKS, expected, strict=True)
    )
    randomize(model)
    for task, old in zip(TASKS, expected, strict=True):
        assert not torch.allclose(model(task.name, inputs_of(encoder, task)), old, atol=1e-3)
    with torch.no_grad():
        for name, (module, leaf) in model.canonical().items():
            if ".decoder." in name:
                getattr(module, leaf).zero_()
    assert all(
        torch.equal(model(task.name, inputs_of(encoder, task)), old) for task, old in zip(TASKS, expected, strict=True)
    )


def values(model):
    return {name: getattr(module, leaf) for name, (module, leaf) in model.canonical().items()}


def linear(value, path, given):
    return given @ value[f"{path}.weight"].T + value[f"{path}.bias"]


@pytest.mark.parametrize("wiring", ["parallel", "alternative"])
def test_a_layer_computes_what_the_papers_code_does(folders, wiring):
    encoder, model = extended(folders["bert"], wiring=wiring, share="projections")
    randomize(model)
    value, seen = values(model), {}
    layer = model.encoder.encoder.layer[0]
    parts = {
        "h": layer, "mh": layer.attention.output.dense, "a": layer.attention.output.LayerNorm,
        "ffn": layer.output.dense, "end": layer.output.LayerNorm,
    }  # fmt: skip
    for name, part in parts.items():
        if name == "h":
            part.register_forward_pre_hook(lambda module, given: seen.update(h=given[0]))
        else:
            part.register_forward_hook(lambda module, given, output, name=name: seen.update({name: output}))
    inputs = inputs_of(encoder, TASKS[0])
    model.encode("single", inputs)
    # Attention of three heads, two wide, over the tokens that are there; gelu behind the decoder.
    small = linear(value, "adapters.single.shared.encoder", seen["h"])
    query, key, value_ = (
        linear(value, f"adapters.single.layer.0.attention.{part}", small).unflatten(-1, (3, 2)).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.transpose(-1, -2) / 2**0.5
    scores = scores.masked_fill(inputs.mask[:, None, None, :] == 0, float("-inf"))
    mixed = (scores.softmax(-1) @ value_).transpose(1, 2).flatten(2)
    added = torch.nn.functional.gelu(linear(value, "adapters.single.shared.decoder", mixed))
    norm = layer.output.LayerNorm if wiring == "parallel" else layer.attention.output.LayerNorm
    summed = seen["ffn"] + seen["a"] if wiring == "parallel" else seen["mh"] + seen["h"]
    expected = torch.nn.functional.layer_norm(summed + added, (32,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(seen["end" if wiring == "parallel" else "a"], expected, atol=1e-5, rtol=1e-5)


def test_low_rank_has_its_gelu_between_the_projections(folders):
    _, model = extended(folders["bert"], kind="low_rank")
    randomize(model)
    value, hidden = values(model), torch.randn(2, 5, 32)
    small = torch.nn.functional.gelu(linear(value, "adapters.pair.layer.1.encoder", hidden))
    expected = linear(value, "adapters.pair.layer.1.decoder", small)
    torch.testing.assert_close(model.adapters._modules["pair"](1, hidden, torch.ones(2, 5)), expected)


@pytest.mark.parametrize("wiring", ["parallel", "alternative"])
def test_padding_does_not_change_the_answers(folders, wiring):
    encoder, model = extended(folders["bert"], wiring=wiring)
    randomize(model)
    inputs = inputs_of(encoder, TASKS[0])
    pad = torch.zeros(len(inputs.ids), 3, dtype=torch.long)
    longer = Inputs(*(torch.cat([part, pad], 1) for part in (inputs.ids, inputs.mask, inputs.segments)))
    torch.testing.assert_close(model("single", longer), model("single", inputs), atol=1e-5, rtol=1e-5)


def test_a_task_without_adapters_has_the_plain_encoder_and_others_are_left_alone(folders):
    encoder, plain = plain_of(folders["bert"])
    _, model = extended(folders["bert"], tasks=["single"])
    randomize(model)
    inputs = inputs_of(encoder, TASKS[1])
    before = model("single", inputs_of(encoder, TASKS[0]))
    assert torch.equal(model("pair", inputs), plain("pair", inputs))
    assert torch.equal(model("single", inputs_of(encoder, TASKS[0])), before)
    assert {owner_task(name) for name in model.canonical() if name.startswith("adapters.")} == {"single"}


def test_gradients_reach_the_tasks_own_adapters_only(folders):
    encoder, model = extended(folders["bert"])
    model("single", inputs_of(encoder, TASKS[0])).sum().backward()
    moved = {owner_task(name) for name, value in values(model).items() if value.grad is not None}
    assert moved == {None, "single"}


def test_names_and_layers(folders):
    _, model = extended(folders["bert"], share="projections")
    own = [name for name in model.canonical() if name.startswith("adapters.single.")]
    attention = [
        f"adapters.single.layer.{number}.attention.{part}.{leaf}"
        for number in (0, 1)
        for part in ("query", "key", "value")
        for leaf in ("weight", "bias")
    ]
    shared = [f"adapters.single.shared.{part}.{leaf}" for part in ("encoder", "decoder") for leaf in ("weight", "bias")]
    assert sorted(own) == sorted([*shared, *attention])
    assert {layer_of(name) for name in own} == {"adapters.single"}


def test_every_value_starts_by_its_name_and_the_seed(folders):
    _, first = extended(folders["bert"])
    torch.manual_seed(99)
    _, second = extended(folders["bert"], tasks=["pair"])
    _, third = extended(folders["bert"], seed=1)
    name = "adapters.pair.layer.1.attention.key.weight"
    one, two, three = (values(model)[name] for model in (first, second, third))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert 0.01 < one.std() < 0.03


def test_of_an_odd_number_of_layers_mixed_gives_the_middle_one_pals():
    assert layer_kinds(AdaptersConfig(kind="mixed"), 3) == ("pals", "pals", "low_rank")


def test_adapters_are_the_tasks_own_unless_the_plan_names_them_or_keeps_all_at_its_client(folders):
    _, model = extended(folders["bert"], kind="low_rank")
    names, name = list(model.canonical()), "adapters.single.layer.0.encoder.weight"
    config = ModelConfig(adapters=AdaptersConfig())

    def level(*rules):
        plan = extended_plan(SharingPlan(rules), names, config)
        check_plan(plan, names)
        return plan.level(name)

    assert level(("heads.*", "task"), ("*", "all")) == "task"
    assert level(("heads.*", "task"), ("*", "fixed")) == "task"
    assert level(("*", "client")) == "client"
    assert level(("adapters.single.*", "client"), ("adapters.*", "task"), ("heads.*", "task"), ("*", "all")) == "client"
    with pytest.raises(ConfigError, match=r"an adapter belongs to its task; put `- \"adapters.\*\": task`"):
        level(("heads.*", "task"), ("adapters.*", "all"), ("*", "all"))


def test_an_encoder_of_another_layout_is_refused(folders):
    with pytest.raises(ConfigError, match=r"model.adapters: modernbert has no norm behind every layer.*distilbert"):
        extended(folders["modernbert"])


@pytest.mark.parametrize(
    ("kind", "wiring", "norms"),
    [
        ("distilbert", "parallel", "transformer.layer.{}.output_layer_norm"),
        ("distilbert", "alternative", "transformer.layer.{}.sa_layer_norm"),
        ("mpnet", "alternative", "encoder.layer.{}.attention.LayerNorm"),
        # One norm that both layers use.
        ("albert", "parallel", "encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm"),
    ],
)
def test_every_layer_adds_its_adapter_in_front_of_its_norm(folders, kind, wiring, norms):
    encoder, model = extended(folders[kind], wiring=wiring, kind="low_rank")
    _, plain = plain_of(folders[kind])
    randomize(model)
    seen = {"with": [], "without": []}
    for name, one in (("with", model), ("without", plain)):
        for path in dict.fromkeys(norms.format(number) for number in (0, 1)):
            # The adapters' hook came first: this one sees what the norm gets.
            one.encoder.get_submodule(path).register_forward_pre_hook(
                lambda module, given, name=name: seen[name].append(given[0])
            )
        one.encode("single", inputs_of(encoder, TASKS[0]))
    assert len(seen["with"]) == len(seen["without"]) == 2
    # Up to the first norm both computed the same, and what enters the first layer is what the embeddings gave.
    output = plain.encoder(**_given(plain, inputs_of(encoder, TASKS[0])), output_hidden_states=True)
    added = model.adapters._modules["single"](0, output.hidden_states[0], inputs_of(encoder, TASKS[0]).mask)
    torch.testing.assert_close(seen["with"][0], seen["without"][0] + added)
    with torch.no_grad():
        before = model("single", inputs_of(encoder, TASKS[0]))
        values(model)["adapters.single.layer.1.decoder.bias"].add_(torch.arange(32.0))
        assert not torch.allclose(model("single", inputs_of(encoder, TASKS[0])), before, atol=1e-3)


def _given(model, inputs):
    offered = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "token_type_ids": inputs.segments}
    return {name: offered[name] for name in model.accepts}


def test_copies_compute_with_their_own_adapters(folders):
    encoder, model = extended(folders["bert"])
    randomize(model)
    inputs = inputs_of(encoder, TASKS[0])
    before = model("single", inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other("single", inputs), before)
        with torch.no_grad():
            values(other)["adapters.single.layer.0.decoder.bias"].add_(1.0)
        assert not torch.equal(other("single", inputs), before)
        assert torch.equal(model("single", inputs), before)
