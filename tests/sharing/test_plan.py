import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.config import SharingConfig
from fedmtl.errors import ConfigError
from fedmtl.sharing.plan import Key, SharingPlan, check_plan, move, plan_from_config, scope_tasks

TREE = {"nlu": {"pair": ["qqp", "stsb"], "single": ["sst2"]}, "other": ["ag"]}
TASKS = ["sst2", "qqp", "stsb", "ag"]


def plan_of(*rules: tuple[str, str], groups: dict | None = None) -> SharingPlan:
    return plan_from_config(SharingConfig(rules=[{pattern: level} for pattern, level in rules], groups=groups or {}))


@pytest.mark.parametrize(
    ("level", "scope"),
    [
        ("all", "all"),
        ("fixed", "fixed"),
        ("task", "task:qqp"),
        ("client", "client:c7"),
        ("group", "group:nlu"),
        ("group.1", "group:nlu"),
        ("group.2", "group:nlu/pair"),
    ],
)
def test_a_level_says_where_a_value_lives(level, scope):
    plan = plan_of(("*", level), groups=TREE)
    assert plan.key("w", "qqp", "c7") == Key(scope, "w")


def test_a_task_outside_every_group_of_a_depth_shares_with_its_own_clients():
    # ag is in a group of depth 1, and in none of depth 2.
    plan = plan_of(("*", "group.2"), groups=TREE)
    assert plan.key("w", "ag", "c1").scope == "task:ag"
    assert plan_of(("*", "group"), groups=TREE).key("w", "ag", "c1").scope == "group:other"
    assert plan_of(("*", "group"), groups={"pair": ["qqp", "stsb"]}).key("w", "sst2", "c1").scope == "task:sst2"


def test_the_first_rule_that_matches_wins():
    plan = plan_of(("encoder.layer.1.*", "task"), ("encoder.*", "fixed"), ("*", "all"))
    names = ["encoder.layer.1.weight", "encoder.layer.0.weight", "embeddings.weight"]
    assert [plan.level(name) for name in names] == ["task", "fixed", "all"]
    assert plan.with_rule("encoder.layer.1.*", "client").level("encoder.layer.1.weight") == "client"


def test_a_rule_replaces_one_of_the_same_pattern():
    plan = plan_of(("encoder.*", "all"), ("*", "all")).with_rule("encoder.*", "task").with_rule("encoder.*", "group")
    assert plan.rules == (("encoder.*", "group"), ("*", "all"))


def test_a_task_has_keys_for_the_encoder_and_its_own_head_only():
    plan = plan_of(("heads.*", "task"), ("*", "all"))
    views = plan.keys(["w", "heads.a.bias", "heads.b.bias"], ["a", "b"], "c1")
    assert views == {
        "a": {"w": Key("all", "w"), "heads.a.bias": Key("task:a", "heads.a.bias")},
        "b": {"w": Key("all", "w"), "heads.b.bias": Key("task:b", "heads.b.bias")},
    }


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ConfigError, match=r"no rule matches the parameter `embeddings.weight`"):
        check_plan(plan_of(("heads.*", "task")), ["heads.a.bias", "embeddings.weight"])


@pytest.mark.parametrize(
    ("rules", "unused"),
    [
        ([("heads.*", "task"), ("encodr.*", "fixed"), ("*", "all")], "encodr.*"),
        ([("*.bias", "task"), ("heads.*", "task"), ("*", "all")], "heads.*"),
        ([("heads.*", "task"), ("*", "all"), ("heads.*", "client")], "heads.*"),
    ],
    ids=["matches nothing", "shadowed", "the same pattern twice"],
)
def test_a_rule_that_decides_nothing_is_named(rules, unused):
    with pytest.raises(ConfigError, match="matches no parameter that an earlier rule left") as caught:
        check_plan(plan_of(*rules), ["heads.a.bias", "w"])
    assert f"`{unused}`" in str(caught.value)


@pytest.mark.parametrize("level", ["all", "group"])
def test_a_head_belongs_to_its_task(level):
    with pytest.raises(ConfigError, match=rf"`heads.qqp.bias` is at level {level}, but a head belongs to its task"):
        check_plan(plan_of(("*", level), groups=TREE), ["heads.qqp.bias"])


def test_examples_count_for_the_scopes_their_task_is_in():
    plan = plan_of(("*", "all"), groups=TREE)
    expected = {
        "all": TASKS,
        "fixed": TASKS,
        "client:c1": TASKS,
        "task:qqp": ["qqp"],
        "group:nlu": ["sst2", "qqp", "stsb"],
        "group:nlu/pair": ["qqp", "stsb"],
        "group:other": ["ag"],
    }
    assert {scope: scope_tasks(plan, scope, TASKS) for scope in expected} == expected


def test_a_finer_level_copies_a_value_to_each_scope():
    moved = move(
        {Key("all", "w"): torch.tensor([3.0])}, plan_of(("*", "all")), plan_of(("*", "group.2"), groups=TREE), TASKS
    )
    assert {key.scope: value.tolist() for key, value in moved.items()} == {
        "group:nlu/single": [3.0],
        "group:nlu/pair": [3.0],
        "task:ag": [3.0],
    }
    # Copies, not views: one scope's training must not reach another's.
    moved[Key("task:ag", "w")].add_(1.0)
    assert moved[Key("group:nlu/pair", "w")].item() == 3.0


def test_a_coarser_level_averages_each_value_once():
    old = plan_of(("*", "group.2"), groups=TREE)
    weights = {
        Key("group:nlu/pair", "w"): torch.tensor([1.0]),
        Key("group:nlu/single", "w"): torch.tensor([3.0]),
        Key("task:ag", "w"): torch.tensor([8.0]),
    }
    # all: (1 + 3 + 8) / 3 = 4, though two tasks stand behind the 1; nlu alone: (1 + 3) / 2 = 2.
    assert move(weights, old, plan_of(("*", "all")), TASKS)[Key("all", "w")].item() == 4.0
    halves = move(weights, old, plan_of(("*", "group"), groups=TREE), TASKS)
    assert {key.scope: value.item() for key, value in halves.items()} == {"group:nlu": 2.0, "group:other": 8.0}


def test_the_mean_of_equal_values_is_their_value_and_missing_ones_stay_missing():
    old, new = plan_of(("*", "task")), plan_of(("*", "group"), groups={"one": ["sst2", "qqp", "stsb"], "two": ["ag"]})
    # in float32, (.9 + .9 + .9) / 3 is another number than .9
    weights = {Key(f"task:{task}", "w"): torch.tensor([0.9]) for task in ("sst2", "qqp", "stsb")}
    moved = move(weights, old, new, TASKS, partial=True)
    assert moved.keys() == {Key("group:one", "w")}
    assert torch.equal(moved[Key("group:one", "w")], torch.tensor([0.9]))
    with pytest.raises(ConfigError, match="cannot move"):
        move(weights, old, new, TASKS)


def test_a_head_that_becomes_fixed_keeps_its_value_and_leaves_others_alone():
    old = plan_of(("heads.*", "task"), ("*", "all"))
    weights = {
        Key("all", "w"): torch.tensor([1.0]),
        Key("task:qqp", "heads.qqp.bias"): torch.tensor([5.0]),
        Key("task:ag", "heads.ag.bias"): torch.tensor([7.0]),
    }
    moved = move(weights, old, old.with_rule("heads.qqp.*", "fixed"), TASKS)
    assert {tuple(key): value.item() for key, value in moved.items()} == {
        ("all", "w"): 1.0,
        ("fixed", "heads.qqp.bias"): 5.0,
        ("task:ag", "heads.ag.bias"): 7.0,
    }


def test_a_value_of_the_server_cannot_become_a_clients_own_in_a_run():
    with pytest.raises(ConfigError, match="`w` cannot move from all to client"):
        move({Key("all", "w"): torch.ones(1)}, plan_of(("*", "all")), plan_of(("*", "client")), TASKS)


WORD = st.text(max_size=8)
DEPTHS = st.lists(st.dictionaries(WORD, WORD, max_size=3), min_size=1, max_size=3)


@given(DEPTHS, st.data())
def test_a_plan_comes_back_from_json_as_it_was(groups, data):
    levels = st.sampled_from(
        ["all", "task", "client", "fixed", "group", *(f"group.{d + 1}" for d in range(len(groups)))]
    )
    rules = data.draw(st.lists(st.tuples(WORD, levels), max_size=4))
    plan = SharingPlan(tuple(rules), tuple(groups))
    assert SharingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["all", "group.2"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({"rules": JSON | st.lists(st.lists(JSON, max_size=3)), "groups": JSON}))
def test_a_plan_of_any_values_is_a_config_error_or_a_plan_that_answers(values):
    with suppress(ConfigError):
        SharingPlan.from_dict(values).keys(["w", "heads.qqp.w"], ["qqp"], "c1")


@pytest.mark.parametrize("level", ["group.0", "group.2", "group.-1", "group.1.1", "everybody", "ALL", "", "all\n"])
def test_a_plan_with_a_level_that_there_is_not_is_refused(level):
    with pytest.raises(ConfigError, match=r"its rules cannot be read|a depth of groups, and there are 1"):
        SharingPlan.from_dict({"rules": [["*", level]], "groups": [{"qqp": "pair"}]})
