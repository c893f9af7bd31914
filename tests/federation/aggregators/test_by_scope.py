import pytest
import torch

from fedmtl.capabilities import aggregator
from fedmtl.config import AggregationConfig, Config, TaskConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.aggregators.by_scope import aggregation_event, check_of, check_patterns, combined_scopes
from fedmtl.federation.messages import ClientInfo, Round
from fedmtl.federation.server import rounds
from fedmtl.runs.events import AggregationEvent
from fedmtl.sharing.plan import Extra, Key, SharingPlan

from ..fake_engine import ENCODER, NAMES, PLAN, FakeEngine, make_server, scores, start, trained
from ..fake_engine import head as fake_head
from .made_updates import SHARED, combined, head, update

MIXED = {"rule": "clipped_mean", "scopes": {"task:*": "coordinate_median", "all": {"rule": "multi_krum"}}}


def rule_of(section):
    config = Config(tasks={"sst2": TaskConfig()}, federation={"aggregation": section})
    return aggregator(config)


def run(section, engine=None) -> list[Round]:
    server = make_server(aggregation=section)
    return list(rounds(start(), server, engine or FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))


def test_each_scope_is_combined_by_the_first_rule_that_matches():
    before = {SHARED: torch.zeros(1), head("sst2"): torch.zeros(1)}
    updates = [
        update("a", {SHARED: [1.0], head("sst2"): [1.0]}),
        update("b", {SHARED: [3.0], head("sst2"): [2.0]}),
        update("c", {SHARED: [90.0], head("sst2"): [90.0]}),
    ]
    moved = combined(rule_of(MIXED)(before, Extra()), updates)
    # Multi-Krum keeps 1 and 3; the median of the head is 2.
    assert (moved[SHARED].item(), moved[head("sst2")].item()) == (2.0, 2.0)
    moved = combined(rule_of({"scopes": {"task:sst2": "coordinate_median"}})(before, Extra()), updates)
    assert (moved[SHARED].item(), moved[head("sst2")].item()) == (pytest.approx(94 / 3), 2.0)


def test_each_rule_remembers_its_scopes_and_no_others():
    section = {"rule": "clipped_mean", "scopes": {"task:*": "centered_clipping"}}
    rule = rule_of(section)
    made = rule({SHARED: torch.zeros(1), head("sst2"): torch.zeros(1)}, Extra())
    combined(made, [update("a", {SHARED: [2.0], head("sst2"): [3.0]})])
    extra = made.remember()
    assert extra.values["0"]["norms"] == {"task:sst2": 3.0}
    assert extra.values["1"]["norms"] == {"all": 2.0}
    assert {slot: list(values) for slot, values in extra.tensors.items()} == {"0.center": [head("sst2")]}
    check_of(rule)(extra)
    # A layer that moved to the scope of another rule leaves its center behind.
    moved = Extra(extra.values, {"0.center": {SHARED: torch.ones(1)}})
    assert rule.part(moved, 0).tensors == {}


@pytest.mark.parametrize(
    "wrong",
    [
        Extra({"2": {"norms": {"all": 1.0}}}),
        Extra({"0": {"norms": {"all": -1.0}}}),
        Extra(tensors={"1.center": {SHARED: torch.ones(1)}}),
        Extra(tensors={"center": {SHARED: torch.ones(1)}}),
    ],
)
def test_a_state_of_other_rules_is_refused(wrong):
    with pytest.raises(ValueError):
        check_of(rule_of({"rule": "clipped_mean", "scopes": {"task:*": "centered_clipping"}}))(wrong)


def test_the_state_goes_from_round_to_round_under_one_name():
    steps = {"a": 1.0, "b": 2.0, "c": -30.0}
    engine = FakeEngine(lambda job: trained(job, steps[job.client]))
    one = run({"scopes": {"all": "clipped_mean"}}, engine)
    assert one[1].state.extra["by_scope"].values["0"]["norms"] == {"all": 2.0}
    # The encoder as by clipped_mean, (1 + 3 * 2 - 2) / 5; a head by the mean, (1 + 3 * 2) / 4.
    assert one[1].state.weights[ENCODER].item() == pytest.approx(1.0)
    assert one[1].state.weights[fake_head("sst2")].item() == pytest.approx(7 / 4)


SCOPES = ["all", "task:sst2", "task:stsb"]


@pytest.mark.parametrize(
    ("scopes", "message"),
    [
        ({"group:pair": "mean"}, r"scopes: `group:pair` matches no scope that is combined; there are all, task:sst2"),
        ({"*": "mean", "all": "mean"}, r"scopes: `all` matches no scope that is combined; a pattern before it takes"),
    ],
)
def test_a_pattern_without_a_scope_is_an_error(scopes, message):
    check_patterns(AggregationConfig(scopes={"task:st*": "mean", "task:*": "mean", "all": "mean"}), SCOPES)
    with pytest.raises(ConfigError, match=message):
        check_patterns(AggregationConfig(scopes=scopes), SCOPES)


def test_a_plan_that_moves_may_come_to_its_groups():
    plan = SharingPlan(
        (("heads.*", "task"), ("frozen", "fixed"), ("own", "client"), ("*", "all")), ({"a": "x", "b": "x"},)
    )
    names = ["layer", "frozen", "own", "heads.a.w", "heads.b.w"]
    assert combined_scopes(plan, names, ["a", "b"], moves=False) == ["all", "task:a", "task:b"]
    assert combined_scopes(plan, names, ["a", "b"], moves=True) == ["all", "task:a", "task:b", "group:x"]


def test_where_fewer_than_three_share_a_scope_it_is_said_once_at_the_start():
    turns = run(MIXED)
    said = [(turn.number, event) for turn in turns for event in turn.events if isinstance(event, AggregationEvent)]
    [(number, event)] = said
    assert number == 0
    assert {scope: (one.rule, one.clients) for scope, one in event.scopes.items()} == {
        "all": ("multi_krum", 3),
        "task:sst2": ("coordinate_median", 2),
        "task:stsb": ("coordinate_median", 1),
    }
    assert event.helpless == ["task:sst2", "task:stsb"]
    [line] = event.lines()
    assert line.endswith("fewer than three clients share a scope: task:sst2 (2), task:stsb (1)")


def test_a_mean_has_nothing_to_say_of_its_scopes():
    assert not any(isinstance(event, AggregationEvent) for turn in run("mean") for event in turn.events)
    clients = {name: ClientInfo({"sst2": 1}) for name in "abc"}
    event = aggregation_event(AggregationConfig(rule="multi_krum"), PLAN, NAMES, clients)
    assert (event.helpless, event.lines()) == ([], [])
    mixed = AggregationConfig(scopes={"all": "multi_krum"})
    event = aggregation_event(mixed, PLAN, NAMES, {"a": ClientInfo({"sst2": 1})})
    # The head is averaged plainly, as its config says: only where a rule was wanted is there one that cannot help.
    assert event.helpless == ["all"]


def test_a_rule_of_another_package_sees_its_scopes_alone():
    seen = []

    class Watching:
        def __init__(self, before, extra):
            self.keys = []

        def add(self, one, weights):
            seen.extend(one.delta)
            assert Key("all", "layer") not in one.delta
            with pytest.raises(KeyError):
                one.delta[SHARED]

        def result(self):
            return {}

        def remember(self):
            return Extra()

    from fedmtl.federation.aggregators.by_scope import ByScope
    from fedmtl.federation.aggregators.mean import Mean

    rule = ByScope([("task:*", Watching), ("*", Mean)])
    made = rule({SHARED: torch.zeros(1), head("sst2"): torch.zeros(1)}, Extra())
    moved = combined(made, [update("a", {SHARED: [2.0], head("sst2"): [3.0]})])
    assert seen == [head("sst2")]
    assert list(moved) == [SHARED]
