import sys

import pytest
import torch

from fedmtl.config import LoraConfig, ModelConfig
from fedmtl.errors import ConfigError
from fedmtl.model.lora import A, B, default_targets, extended_plan, fixed_patterns, merge, target_paths
from fedmtl.sharing.plan import SharingPlan, check_plan
from fedmtl.training.stacked.shape import stacks_with

from .tiny import KINDS, PAIRS, SINGLES, encode, load, make_task

TASKS = [make_task("single", pool="cls"), make_task("pair", text=("a", "b"), pool="cls", outputs=1)]
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
DISTILBERT = ["q_lin", "k_lin", "v_lin", "ffn.lin1", "lin2"]


def extended(folder, tasks=TASKS, seed=0, **lora):
    return load(folder, tasks, seed, lora={"rank": 2, **lora})


def answers(model, encoder, tasks=TASKS):
    rows = {task.name: PAIRS if task.is_pair else SINGLES for task in tasks}
    return [model(task.name, encode(encoder.tokenizer, task, rows[task.name])) for task in tasks]


def randomize(model):
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, (module, leaf) in model.canonical().items():
            if name.endswith((A, B)):
                getattr(module, leaf).normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize(("kind", "targets"), [*((kind, None) for kind in KINDS), ("distilbert", DISTILBERT)])
@pytest.mark.parametrize("mode", ["adapters", "last_linear", "full_model"])
def test_a_fresh_lora_changes_no_bit_of_the_answers(folders, kind, targets, mode):
    encoder, plain = load(folders[kind], TASKS, pool="cls", encoder_dropout=0)
    plain.layout = None
    _, model = extended(folders[kind], mode=mode, **({"targets": targets} if targets else {}))
    for ours, theirs in zip(answers(model, encoder), answers(plain, encoder), strict=True):
        assert torch.equal(ours, theirs)
    randomize(model)
    for ours, theirs in zip(answers(model, encoder), answers(plain, encoder), strict=True):
        assert not torch.allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("mode", ["adapters", "last_linear"])
def test_merged_into_plain_weights_it_gives_the_same_answers(folders, mode):
    encoder, model = extended(folders["bert"], mode=mode, alpha=6)
    randomize(model)
    plain_encoder, plain = load(folders["bert"], TASKS)
    model, plain = model.double(), plain.double()
    values = {name: getattr(module, leaf) for name, (module, leaf) in model.canonical().items()}
    merged = merge(values, model.lora)
    assert list(merged) == list(plain.canonical())
    with torch.no_grad():
        for name, (module, leaf) in plain.canonical().items():
            getattr(module, leaf).copy_(merged[name])
    for ours, theirs in zip(answers(model, encoder), answers(plain, plain_encoder), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    # alpha / rank = 3
    path = "encoder.layer.1.output.dense"
    product = values[path + B] @ values[path + A]
    torch.testing.assert_close(merged[f"{path}.weight"], values[f"{path}.weight"] + 3 * product)


def test_names_are_those_of_the_plain_encoder_and_what_was_added(folders):
    _, plain = load(folders["bert"], TASKS)
    _, model = extended(folders["bert"], mode="last_linear")
    added = [name for name in model.canonical() if name not in plain.canonical()]
    assert [name for name in model.canonical() if name not in added] == list(plain.canonical())
    # two matrices for five layers in each of two, and for two heads
    assert len(added) == 2 * (5 * 2 + 2)
    assert "encoder.layer.0.attention.self.query.lora_A.weight" in added
    assert "heads.single.lora_B.weight" in added


def test_a_task_may_have_any_name_under_lora(folders):
    names = ("type", "default", "base_layer")
    tasks = [make_task(name, pool="cls") for name in names]
    encoder, model = extended(folders["bert"], tasks, mode="last_linear")
    _, plain = load(folders["bert"], tasks)
    assert {name for name in plain.canonical() if name not in model.canonical()} == set()
    assert {f"heads.{name}.lora_A.weight" for name in names} <= set(model.canonical())
    assert len(answers(model, encoder, tasks)) == 3


def test_every_matrix_starts_by_its_name_and_the_seed(folders):
    _, model = extended(folders["bert"])
    torch.manual_seed(99)
    _, fewer = extended(folders["bert"], targets=["value", "query"])
    _, other = extended(folders["bert"], seed=1)
    name = "encoder.layer.1.attention.self.value"
    first, second, third = (getattr(*each.canonical()[name + A]) for each in (model, fewer, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    # kaiming with a = sqrt(5): uniform within 1 / sqrt(32)
    assert 0.15 < first.abs().max() <= 32**-0.5
    assert not getattr(*model.canonical()[name + B]).any()


def test_output_is_the_feed_forward_layers_and_not_the_attentions(folders):
    encoder, _ = load(folders["bert"], TASKS)
    assert target_paths(encoder.module, ["output"]) == [f"encoder.layer.{n}.output.dense" for n in (0, 1)]
    assert target_paths(encoder.module, ["output.dense"]) == target_paths(encoder.module, ["output"])
    attention = [f"encoder.layer.{n}.attention.output.dense" for n in (0, 1)]
    assert target_paths(encoder.module, ["attention.output"]) == attention


def test_a_target_that_is_not_there_names_some_that_are(folders):
    with pytest.raises(ConfigError, match=r"model.lora.targets: `query` is no linear layer.*attention\.q_lin"):
        extended(folders["distilbert"], targets=["query"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_targets_queries_keys_values_and_both_feed_forward_layers_get_it(folders, kind):
    encoder, _ = load(folders[kind], TASKS, pool="cls")
    paths = target_paths(encoder.module, default_targets(encoder.module))
    # ALBERT's layers share one set of weights; ModernBERT has queries, keys and values in one matrix.
    assert len(paths) == {"albert": 5, "modernbert": 2 * 3}.get(kind, 2 * 5)
    assert not any("attention.output" in path or "pooler" in path or "out_lin" in path for path in paths)


def test_chosen_layers_alone_get_it_and_train(folders):
    for kind, added in (
        ("bert", "encoder.layer.1."),
        ("distilbert", "transformer.layer.1."),
        ("modernbert", "layers.1."),
    ):
        _, model = extended(folders[kind], layers=[1])
        wrapped = [name for name in model.canonical() if name.endswith((A, B))]
        assert wrapped
        assert all(name.startswith(added) for name in wrapped)
        plan = extended_plan(PLAN, list(model.canonical()), ModelConfig(lora=model.lora))
        check_plan(plan, list(model.canonical()))
        assert {name for name in model.canonical() if plan.level(name) == "all"} == set(wrapped)


def test_layers_that_are_not_there_or_not_apart_are_refused(folders):
    with pytest.raises(ConfigError, match=r"^model\.lora\.layers: found 2, the encoder has layers 0 to 1$"):
        extended(folders["bert"], layers=[0, 2])
    with pytest.raises(
        ConfigError, match=r"^model\.lora\.layers: the layers of albert share their weights; leave it out$"
    ):
        extended(folders["albert"], layers=[0])


def test_without_peft_the_error_is_one_line(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"^model.lora: needs peft.*'\.\[lora\]'`"):
        extended(folders["bert"])


def test_rules_fix_what_does_not_train_and_keep_the_plan_for_the_rest(folders):
    _, model = extended(folders["bert"], mode="full_model")
    names = list(model.canonical())
    rules = (("heads.*", "task"), ("encoder.layer.1.*", "group"), ("*", "all"))
    plan = extended_plan(SharingPlan(rules, ({"pair": "g"},)), names, ModelConfig(lora=model.lora))
    check_plan(plan, names)
    assert plan.level("encoder.layer.1.output.dense.weight") == "fixed"
    assert plan.level("encoder.layer.1.output.dense.lora_A.weight") == "group"
    assert plan.level("encoder.layer.1.attention.output.dense.weight") == "group"
    assert plan.level("encoder.layer.0.output.dense.lora_B.weight") == "all"
    assert plan.level("heads.pair.weight") == "fixed"
    assert plan.level("heads.pair.lora_A.weight") == "task"


def test_a_rule_for_what_lora_keeps_is_an_error_unless_it_says_the_same():
    names = ["embeddings.weight", "layer.0.dense.weight", "layer.0.dense.lora_A.weight", "layer.0.dense.lora_B.weight"]
    config = ModelConfig(lora=LoraConfig())
    same = extended_plan(SharingPlan((("embeddings.*", "fixed"), ("*", "all"))), names, config)
    check_plan(same, names)
    assert same.rules == (("embeddings.*", "fixed"), ("layer.*.dense.weight", "fixed"), ("*", "all"))
    with pytest.raises(ConfigError, match=r"`embeddings.\*` is at level task, but `model.lora.mode: adapters` keeps"):
        extended_plan(SharingPlan((("embeddings.*", "task"), ("*", "all"))), names, config)


def test_a_wide_pattern_is_taken_only_where_it_matches_nothing_else():
    # Layer 12 has no lora, so that all of it is fixed; `layer.*` would fix the matrices of the others too.
    names = ["layer.3.q.weight", "layer.3.q.lora_A.weight", "layer.3.q.lora_B.weight", "layer.12.q.weight"]
    assert fixed_patterns(names, LoraConfig()) == ["layer.*.q.weight"]
    names = [*names, "layer.12.norm.weight"]
    assert fixed_patterns(names, LoraConfig()) == ["layer.*.q.weight", "layer.[0-9][0-9].*"]
    assert fixed_patterns(names, LoraConfig(train="b")) == [
        "layer.*.q.weight", "*.lora_A.weight", "layer.[0-9][0-9].*",
    ]  # fmt: skip


def test_where_a_is_the_same_everywhere_the_mean_of_b_is_the_mean_of_the_products():
    torch.manual_seed(0)
    a, b = torch.randn(2, 6, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    weight = torch.zeros(5, 6, dtype=torch.float64)

    def change(own_a, own_b):
        config = LoraConfig(rank=2, alpha=2)
        return merge({"w.weight": weight, "w.lora_A.weight": own_a, "w.lora_B.weight": own_b}, config)["w.weight"]

    torch.testing.assert_close(change(a, b.mean(0)), torch.stack([change(a, own) for own in b]).mean(0))
    many = torch.randn(3, 2, 6, dtype=torch.float64)
    mean = torch.stack([change(own_a, own_b) for own_a, own_b in zip(many, b, strict=True)]).mean(0)
    assert not torch.allclose(change(many.mean(0), b.mean(0)), mean, atol=0.1)


def test_its_dropout_is_in_front_of_a_and_the_heads_dropout_in_front_of_both(folders):
    tasks = [make_task("single", pool="cls", dropout=0.5)]
    _, model = extended(folders["bert"], tasks, mode="last_linear")
    randomize(model)
    with torch.no_grad():
        getattr(*model.canonical()["heads.single.weight"]).zero_()
    vectors = torch.ones(64, 32)
    # With a base of zeros all there is comes through A and B, and half of its features are gone.
    assert len(model.eval().head("single", vectors).unique(dim=0)) == 1
    assert len(model.train().head("single", vectors).unique(dim=0)) > 30


def test_a_model_with_lora_is_computed_by_its_own_module_and_not_stacked(folders):
    _, model = extended(folders["bert"])
    assert model.layout is None
    keys = PLAN.keys(model.canonical(), ["single"], "c1")
    assert stacks_with(model, ["single"], keys, PLAN) is None
