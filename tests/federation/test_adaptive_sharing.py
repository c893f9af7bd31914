from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.config import AdaptiveSharingConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.adaptive_sharing import adapt, movable_layers
from fedmtl.federation.messages import LayerTrack, State
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan

NAMES = ["embeddings.w", *(f"layer.{n}.{leaf}" for n in range(3) for leaf in "wb"), "pooler.w", "heads.a.w"]
RULES = (("heads.*", "task"), ("*", "all"))
PLAIN = SharingPlan(RULES)
GROUPED = SharingPlan(RULES, ({"a": "left", "b": "left", "c": "right", "d": "right"},))
QUICK = AdaptiveSharingConfig(split_below=-0.1, merge_above=0.1, patience=2, warmup_rounds=0, smoothing=0.0)
LAYERS = movable_layers(QUICK, PLAIN, NAMES)
TWO, FOUR = ("a", "b"), ("a", "b", "c", "d")
APART, CLOSE = {"a/b": -0.5}, {"a/b": 0.5}


def start(plan: SharingPlan = PLAIN, tasks: tuple[str, ...] = TWO, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = {Key("all", name): torch.randn(3, generator=generator) for name in NAMES[:-1]}
    return State(1, weights, plan, {"momentum": {key: value + 1 for key, value in weights.items()}})


def after(state: State, *rounds: dict[str, dict[str, float]], tasks: tuple[str, ...] = TWO, rule=QUICK):
    """The state and the last decisions after rounds with these agreements of the named layers."""
    decisions = ()
    for agreement in rounds:
        state, decisions = adapt(replace(state, round=state.round + 1), rule, LAYERS, tasks, agreement)
    return state, {decision.layer: decision for decision in decisions}


def levels(state: State) -> list[str]:
    return [state.plan.level(names[0]) for names in LAYERS.values()]


def everywhere(agreement: dict[str, float]) -> dict[str, dict[str, float]]:
    return dict.fromkeys(LAYERS, agreement)


def test_the_numbered_layers_move_unless_others_are_named():
    assert list(LAYERS) == ["layer.0", "layer.1", "layer.2"]
    assert LAYERS["layer.1"] == ("layer.1.w", "layer.1.b")
    named = AdaptiveSharingConfig(layers=["layer.2", "pooler"])
    assert list(movable_layers(named, PLAIN, NAMES)) == ["layer.2", "pooler"]


def test_a_layer_that_cannot_move_is_an_error_where_it_is_named():
    with pytest.raises(ConfigError, match=r"`layer.7` matches no layer; the encoder has embeddings, layer.0"):
        movable_layers(AdaptiveSharingConfig(layers=["layer.7"]), PLAIN, NAMES)
    mixed = PLAIN.with_rule("layer.1.w", "task")
    with pytest.raises(ConfigError, match=r"the layer layer\.1 is at level all and task"):
        movable_layers(QUICK, mixed, NAMES)
    frozen = PLAIN.with_rule("layer.0.*", "fixed")
    assert list(movable_layers(QUICK, frozen, NAMES)) == ["layer.1", "layer.2"]
    with pytest.raises(ConfigError, match=r"layer\.0 is at level fixed"):
        movable_layers(AdaptiveSharingConfig(layers=["layer.*"]), frozen, NAMES)


def test_what_is_fixed_in_a_layer_stays_when_the_rest_of_it_moves():
    plan = PLAIN.with_rule("layer.*.w", "fixed")
    layers = movable_layers(QUICK, plan, NAMES)
    assert layers["layer.2"] == ("layer.2.b",)
    weights = {plan.key(name, "a", ""): torch.ones(3) for name in NAMES[:-1]}
    state = State(1, weights, plan)
    for number in (2, 3):
        state, _ = adapt(replace(state, round=number), QUICK, layers, TWO, dict.fromkeys(layers, APART))
    assert (state.plan.level("layer.2.b"), state.plan.level("layer.2.w")) == ("task", "fixed")
    assert {Key("task:a", "layer.2.b"), Key("task:b", "layer.2.b"), Key("fixed", "layer.2.w")} <= state.weights.keys()


def test_layers_split_from_the_top_one_in_a_round_after_patience():
    state, decided = after(start(), everywhere(APART))
    assert levels(state) == ["all", "all", "all"]
    assert decided["layer.2"].reason == "tasks disagree, 1 of 2 rounds"
    state, decided = after(state, everywhere(APART))
    assert levels(state) == ["all", "all", "task"]
    assert (decided["layer.2"].before, decided["layer.2"].after) == ("all", "task")
    assert decided["layer.1"].reason == "tasks disagree; waits for the layers above"
    state, _ = after(state, everywhere(APART), everywhere(APART))
    assert levels(state) == ["task", "task", "task"]
    assert state.plan.rules[-2:] == RULES
    assert len(state.plan.rules) == 5


def test_a_layer_below_one_that_agrees_waits():
    only_below = {"layer.0": APART, "layer.1": CLOSE, "layer.2": CLOSE}
    state, decided = after(start(), *[only_below] * 5)
    assert levels(state) == ["all", "all", "all"]
    assert decided["layer.0"].reason == "tasks disagree; waits for the layers above"


def test_layers_merge_from_the_bottom_and_the_rules_do_not_grow():
    state, _ = after(start(), *[everywhere(APART)] * 4)
    state, decided = after(state, everywhere(CLOSE), everywhere(CLOSE))
    assert levels(state) == ["all", "task", "task"]
    assert decided["layer.0"].reason == "tasks agree for 2 rounds"
    assert decided["layer.2"].reason == "tasks agree; waits for the layers below"
    state, _ = after(state, *[everywhere(CLOSE)] * 2)
    assert levels(state) == ["all", "all", "all"]
    assert len(state.plan.rules) == 5
    assert {key.scope for key in state.weights} == {"all"}


def test_between_the_two_bounds_nothing_moves():
    state, _ = after(start(), *[everywhere({"a/b": 0.0})] * 5)
    assert levels(state) == ["all", "all", "all"]
    split, _ = after(start(), *[everywhere(APART)] * 2)
    split, _ = after(split, *[everywhere({"a/b": 0.0})] * 5)
    assert levels(split) == ["all", "all", "task"]


def test_one_other_round_begins_the_count_again():
    state, _ = after(start(), everywhere(APART), everywhere(CLOSE), everywhere(APART))
    assert levels(state) == ["all", "all", "all"]
    assert state.sharing["layer.2"].low == 1


def test_the_agreement_is_smoothed_and_the_warm_up_is_not_in_it():
    rule = QUICK.model_copy(update={"smoothing": 0.75, "warmup_rounds": 2})
    state, decided = after(start(), everywhere({"a/b": 1.0}), rule=rule)
    assert decided["layer.2"].reason == "warm-up"
    assert state.sharing["layer.2"] == LayerTrack()
    state, decided = after(state, everywhere({"a/b": 0.4}), everywhere({"a/b": -0.4}), rule=rule)
    # .75 * .4 + .25 * -.4 = .2
    assert decided["layer.2"].smoothed == pytest.approx({"a/b": 0.2})
    assert decided["layer.2"].measured == {"a/b": -0.4}


def test_a_round_without_evidence_changes_nothing():
    state, _ = after(start(), everywhere(APART))
    state, decided = after(state, {})
    assert state.sharing["layer.2"].low == 1
    assert decided["layer.2"].measured == {}


def pairs(within: float, between: float) -> dict[str, float]:
    return {
        "a/b": within, "c/d": within,
        "a/c": between, "a/d": between, "b/c": between, "b/d": between,
    }  # fmt: skip


def test_tasks_that_disagree_between_groups_split_to_groups_first_and_within_them_to_tasks():
    state = start(GROUPED)
    state, _ = after(state, *[{"layer.2": pairs(0.5, -0.5)}] * 2, tasks=FOUR)
    assert levels(state) == ["all", "all", "group"]
    assert {key.scope for key in state.weights if key.name == "layer.2.w"} == {"group:left", "group:right"}
    state, _ = after(state, *[{"layer.2": pairs(-0.5, -0.5)}] * 2, tasks=FOUR)
    assert levels(state) == ["all", "all", "task"]
    state, _ = after(state, *[{"layer.2": pairs(0.5, -0.5)}] * 2, tasks=FOUR)
    assert levels(state) == ["all", "all", "group"]
    state, _ = after(state, *[{"layer.2": pairs(0.5, 0.5)}] * 2, tasks=FOUR)
    assert levels(state) == ["all", "all", "all"]


def test_one_disagreeing_pair_within_a_group_splits_to_tasks_at_once():
    state, _ = after(start(GROUPED), *[{"layer.2": {**pairs(0.5, 0.5), "c/d": -0.5}}] * 2, tasks=FOUR)
    assert levels(state) == ["all", "all", "task"]


def test_a_pair_that_was_never_measured_is_not_merged():
    state, _ = after(start(GROUPED), *[{"layer.2": pairs(-0.5, -0.5)}] * 2, tasks=FOUR)
    known = {pair: 0.5 for pair in pairs(0.0, 0.0) if pair != "a/d"}
    state = replace(state, sharing={})
    state, _ = after(state, *[{"layer.2": known}] * 4, tasks=FOUR)
    # all would join a and d; the groups would not
    assert levels(state) == ["all", "all", "group"]


def test_a_value_without_optimizer_state_has_none_after_a_move():
    state, _ = after(start(GROUPED), *[{"layer.2": pairs(-0.5, -0.5)}] * 2, tasks=FOUR)
    only_a = {Key("task:a", "layer.2.w"): torch.tensor([1.0, 2.0, 3.0])}
    state = replace(state, server_optimizer={"momentum": only_a})
    state, _ = after(state, *[{"layer.2": pairs(0.5, -0.5)}] * 2, tasks=FOUR)
    [(key, value)] = state.server_optimizer["momentum"].items()
    assert key == Key("group:left", "layer.2.w")
    assert value.tolist() == [1.0, 2.0, 3.0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), num_tasks=st.integers(2, 7), scale=st.floats(1e-6, 1e6))
def test_splitting_and_merging_without_training_is_the_identity(seed, num_tasks, scale):
    tasks = tuple(f"t{n}" for n in range(num_tasks))
    state = start(seed=seed)
    state = replace(state, weights={key: value * scale for key, value in state.weights.items()})
    every = {f"{a}/{b}": 1.0 for i, a in enumerate(tasks) for b in tasks[i + 1 :]}
    apart = dict.fromkeys(every, -1.0)
    split, _ = after(state, *[everywhere(apart)] * 4, tasks=tasks)
    assert levels(split) == ["task"] * 3
    assert len(split.weights) == 2 + 6 * num_tasks
    back, _ = after(split, *[everywhere(every)] * 4, tasks=tasks)
    assert levels(back) == ["all"] * 3
    for slot, values in {"weights": state.weights, **state.server_optimizer}.items():
        others = {"weights": back.weights, **back.server_optimizer}[slot]
        assert values.keys() == others.keys()
        assert all(torch.equal(values[key], others[key]) for key in values)
