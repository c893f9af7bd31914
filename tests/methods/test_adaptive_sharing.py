from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.fake_engine import FakeEngine, make_server, scores, trained
from fedmtl.config import AdaptiveSharingConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import State, Update
from fedmtl.federation.server import rounds
from fedmtl.methods.adaptive_sharing import (
    AdaptiveSharing,
    LayerTrack,
    TaskUpdates,
    adapt,
    check_sent,
    layer_tracks,
    movable_layers,
)
from fedmtl.runs.event_lines import to_json
from fedmtl.sharing.plan import Extra, Key, SharingPlan, layer_of
from fedmtl.training.local import Objective, train
from training.small_client import (
    CPU,
    PLAN,
    SINGLE,
    bind,
    make_methods,
    make_settings,
    make_shard,
    make_task,
    small_model,
)

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
    return with_momentum(State(1, weights, plan), {key: value + 1 for key, value in weights.items()})


def with_momentum(state: State, momentum: dict[Key, torch.Tensor]) -> State:
    return replace(state, extra={**state.extra, "server_optimizer": Extra(tensors={"momentum": momentum})})


def momentum_of(state: State) -> dict[Key, torch.Tensor]:
    return dict(state.extra["server_optimizer"].slot("momentum"))


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
    assert layer_tracks(state)["layer.2"].low == 1


def test_the_agreement_is_smoothed_and_the_warm_up_is_not_in_it():
    rule = QUICK.model_copy(update={"smoothing": 0.75, "warmup_rounds": 2})
    state, decided = after(start(), everywhere({"a/b": 1.0}), rule=rule)
    assert decided["layer.2"].reason == "warm-up"
    assert layer_tracks(state)["layer.2"] == LayerTrack()
    state, decided = after(state, everywhere({"a/b": 0.4}), everywhere({"a/b": -0.4}), rule=rule)
    # .75 * .4 + .25 * -.4 = .2
    assert decided["layer.2"].smoothed == pytest.approx({"a/b": 0.2})
    assert decided["layer.2"].measured == {"a/b": -0.4}


def test_a_round_without_evidence_changes_nothing():
    state, _ = after(start(), everywhere(APART))
    state, decided = after(state, {})
    assert layer_tracks(state)["layer.2"].low == 1
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
    state = replace(state, extra={})
    state, _ = after(state, *[{"layer.2": known}] * 4, tasks=FOUR)
    # all would join a and d; the groups would not
    assert levels(state) == ["all", "all", "group"]


def test_a_value_without_optimizer_state_has_none_after_a_move():
    state, _ = after(start(GROUPED), *[{"layer.2": pairs(-0.5, -0.5)}] * 2, tasks=FOUR)
    only_a = {Key("task:a", "layer.2.w"): torch.tensor([1.0, 2.0, 3.0])}
    state = with_momentum(state, only_a)
    state, _ = after(state, *[{"layer.2": pairs(0.5, -0.5)}] * 2, tasks=FOUR)
    [(key, value)] = momentum_of(state).items()
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
    for values, others in ((state.weights, back.weights), (momentum_of(state), momentum_of(back))):
        assert values.keys() == others.keys()
        assert all(torch.equal(values[key], others[key]) for key in values)


# What the server makes of updates.

SHARED = SharingPlan((("heads.*", "task"), ("*", "all")))
SPLIT = SHARED.with_rule("enc.0.*", "task")
AGREEING = {"enc.0": ("enc.0.w", "enc.0.b")}
PAIR = ["sst2", "stsb"]


def moved(
    client: str, examples: dict[str, int], delta: dict[str, tuple[float, float]], products: object = None
) -> Update:
    """A delta per scope: a weight of one number and a bias of one."""
    tensors = {
        Key(scope, f"enc.0.{leaf}"): torch.tensor([value])
        for scope, pair in delta.items()
        for leaf, value in zip("wb", pair, strict=True)
    }
    extra = {} if products is None else {"adaptive_sharing": Extra({"inner_products": {"enc.0": products}})}
    return Update(1, client, tuple(examples), tensors, None, examples, {}, extra=extra)


SINGLES = [
    moved("a", {"sst2": 1}, {"all": (1.0, 0.0)}),
    moved("b", {"sst2": 3}, {"all": (1.0, 4.0)}),
    moved("c", {"stsb": 2}, {"all": (3.0, -1.0)}),
    moved("d", {"stsb": 2}, {"all": (1.0, 1.0)}),
]


def agreement(updates, plan=SHARED, average="weighted"):
    before = {
        Key(scope, name): torch.zeros(1) for scope in ("all", "task:sst2", "task:stsb") for name in AGREEING["enc.0"]
    }
    sums = TaskUpdates(AGREEING, PAIR, before, plan, average)
    for each in updates:
        sums.add(each)
    return sums.measure()["enc.0"]


def test_agreement_is_the_cosine_of_the_tasks_mean_deltas():
    # sst2: (1*(1,0) + 3*(1,4)) / 4 = (1,3); stsb: (2*(3,-1) + 2*(1,1)) / 4 = (2,0); 2 / (sqrt(10) * 2) = .316228
    assert agreement(SINGLES) == {"sst2/stsb": 0.316228}


def test_in_a_uniform_mean_all_clients_count_the_same():
    # sst2: (1,2), stsb: (2,0): 2 / (sqrt(5) * 2) = .447214
    assert agreement(SINGLES, average="uniform") == {"sst2/stsb": 0.447214}


def test_a_client_with_both_tasks_tells_its_own_cosine_which_counts_by_its_examples():
    both = moved("e", {"stsb": 5, "sst2": 7}, {"all": (9.0, 9.0)}, [[4.0, -3.0], [-3.0, 9.0]])
    # -3 / sqrt(4 * 9) = -.5 for 12 examples, .316228 for 8: (-6 + 2.529822) / 20 = -.173509
    assert agreement([*SINGLES, both]) == {"sst2/stsb": -0.173509}
    assert agreement([both]) == {"sst2/stsb": -0.5}
    # two of its tasks are two clients' worth, and there are four others: (2 * -.5 + 4 * .447214) / 6
    assert agreement([*SINGLES, both], average="uniform")["sst2/stsb"] == pytest.approx(0.131476, abs=1e-6)


def test_a_split_layer_of_such_a_client_is_told_apart_by_its_deltas():
    both = moved(
        "e",
        {"sst2": 1, "stsb": 1},
        {"task:sst2": (1.0, 0.0), "task:stsb": (3.0, 4.0)},
        [[1.0, -1.0], [-1.0, 1.0]],
    )
    # (1,0) and (3,4): 3 / 5
    assert agreement([both], SPLIT) == {"sst2/stsb": 0.6}


def test_what_cannot_be_known_is_left_out():
    silent = moved("e", {"sst2": 1, "stsb": 1}, {"all": (1.0, 1.0)})
    still = moved("f", {"stsb": 1}, {"all": (0.0, 0.0)})
    assert agreement([silent]) == {}
    assert agreement([SINGLES[0], still]) == {}
    assert agreement(SINGLES[:2]) == {}


# What a client measures.

OTHER = make_task("other", pool="pooler")
MEASURED = ("encoder.layer.1", "pooler")
# So small a rate that all steps see the same values.
STILL = {"optimizer": "sgd", "learning_rate": 1e-12, "max_grad_norm": 0.0, "batch_size": 4, "weight_decay": 0.0}


def measured(tmp_path, tasks, plan=PLAN, layers=MEASURED, **training):
    model = small_model(*tasks)
    shards = {task.name: make_shard(task, tmp_path, range(4 * number, 12)) for number, task in enumerate(tasks)}
    methods = {"adaptive_sharing": {"layers": list(layers)}}
    settings = replace(make_settings(*tasks, **{**STILL, **training}), methods=methods)
    bound = bind(model, plan=plan)
    told = train(bound, shards, settings, round_number=1, seed=5, device=CPU, methods=make_methods(settings))
    return model, shards, told.sent["adaptive_sharing"].values["inner_products"] if told.sent else {}


def test_inner_products_are_those_of_the_tasks_summed_gradients(tmp_path):
    model, shards, told = measured(tmp_path, (SINGLE, OTHER))
    # twelve and eight examples in batches of four: three and two mean losses, whichever examples meet in one
    bound = bind(model)
    objective = Objective(bound, shards, CPU)
    sums = {}
    for task, shard in shards.items():
        for key in bound.parameters:
            bound.parameters[key].grad = None
        for start in range(0, len(shard), 4):
            objective.loss(task, shard.indices[start : start + 4]).backward()
        for layer in MEASURED:
            own = [value.grad.flatten() for key, value in bound.parameters.items() if layer_of(key.name) == layer]
            sums[task, layer] = torch.cat(own)
    for layer in MEASURED:
        for i, a in enumerate(shards):
            for j, b in enumerate(shards):
                assert told[layer][i][j] == pytest.approx(float(sums[a, layer] @ sums[b, layer]), rel=1e-6)


def test_momentum_does_not_mix_the_tasks(tmp_path):
    plain = measured(tmp_path, (SINGLE, OTHER))[2]
    mixed = measured(tmp_path, (SINGLE, OTHER), momentum=0.9)[2]
    assert mixed["pooler"][0] == pytest.approx(plain["pooler"][0], rel=1e-6)


def test_a_task_that_does_not_reach_a_layer_has_nothing_in_it(tmp_path):
    by_mean = make_task("other", pool="mean")
    told = measured(tmp_path, (SINGLE, by_mean))[2]
    assert told["pooler"][0][0] > 0
    assert told["pooler"][0][1] == told["pooler"][1][1] == 0
    assert told["encoder.layer.1"][1][1] > 0


def test_nothing_is_told_of_values_that_tasks_do_not_share_or_that_nobody_asked_for(tmp_path):
    split = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "task"), ("*", "all")))
    assert set(measured(tmp_path, (SINGLE, OTHER), split)[2]) == {"pooler"}
    assert measured(tmp_path, (SINGLE, OTHER), layers=())[2] == {}
    assert measured(tmp_path, (SINGLE,))[2] == {}


def test_a_task_that_never_had_its_turn_is_in_no_product(tmp_path):
    # One step is of the first task alone: the update is of it, and so are the products.
    told = measured(tmp_path, (SINGLE, OTHER), task_schedule="round_robin", local_steps=1)[2]
    assert [len(row) for row in told["pooler"]] == [1]


def test_what_no_client_measures_is_refused():
    options = {"layers": ["pooler"]}
    assert check_sent(Extra({"inner_products": {"pooler": [[1.0]]}}), ["single"], options) is None
    assert check_sent(Extra(), ["single"], options) is None
    assert check_sent(Extra({"inner_products": {"encoder.layer.1": [[1.0]]}}), ["single"], options)
    assert check_sent(Extra({"inner_products": {"pooler": [[1.0]]}}), ["single", "other"], options)


# In the loop.


def test_tasks_that_pull_apart_split_the_layer_and_the_rounds_tell_of_it():
    name, heads = "layer.0.w", [Key(f"task:{task}", f"heads.{task}.w") for task in ("sst2", "stsb")]
    method = AdaptiveSharing(QUICK, {"layer.0": (name,)}, ["sst2", "stsb"], "weighted")
    engine = FakeEngine(lambda job: trained(job, -1.0 if job.client == "c" else 1.0))
    server = make_server(methods=[method], server_optimizer={"kind": "fedavgm"})
    server = replace(server, names=(name, *(head.name for head in heads)), table=name)
    begin = State(0, {key: torch.zeros(1) for key in (Key("all", name), *heads)}, PLAIN)
    turns = list(rounds(begin, server, engine, lambda state: scores(sst2=0.5, stsb=0.5)))
    assert [turn.state.plan.level(name) for turn in turns] == ["all", "all", "task", "task"]
    # The two clients of sst2 go up by one and that of stsb down by one: a cosine of -1 in each of the rounds.
    told = {"layer": "layer.0", "agreement": {"sst2/stsb": -1.0}, "measured": {"sst2/stsb": -1.0}}
    first = {**told, "before": "all", "after": "all", "reason": "tasks disagree, 1 of 2 rounds"}
    second = {**told, "before": "all", "after": "task", "reason": "tasks disagree for 2 rounds"}
    assert turns[0].events == ()
    assert [*map(to_json, turns[1].events)] == [{"event": "sharing", "round": 1, "layers": [first]}]
    assert [*map(to_json, turns[2].events)] == [{"event": "sharing", "round": 2, "layers": [second]}]
    last = turns[-1].state
    split = {Key("task:sst2", name), Key("task:stsb", name)}
    assert last.weights.keys() == {*split, *heads}
    assert momentum_of(last).keys() == {*split, *heads}
    method.check(last.extra["adaptive_sharing"])
