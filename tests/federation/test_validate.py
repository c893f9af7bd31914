from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.capabilities import _REGISTERED, Capability, register
from fedmtl.federation.messages import ClientInfo, Job, Update
from fedmtl.federation.validate import counted_examples, expect, refusal
from fedmtl.sharing.plan import Extra, Key, SharingPlan

ENCODER, HEAD = Key("all", "layer"), Key("task:sst2", "heads.sst2.weight")
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
WEIGHTS = {ENCODER: torch.zeros(2, 2), HEAD: torch.zeros(2), Key("fixed", "frozen"): torch.zeros(1)}
JOB = Job("train", 3, "c1", ("sst2",), WEIGHTS, PLAN, np.array([0, 1]), 0, 0, {})
GOOD = Update(
    3, "c1", ("sst2",), {ENCODER: torch.ones(2, 2), HEAD: torch.ones(2)}, np.array([0, 1]), {"sst2": 5}, {"sst2": 0.1}
)


def test_a_good_update_is_accepted():
    assert refusal(GOOD, expect(JOB)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": "c2"}, "answered as c2"),
        ({"round": 2}, "is for round 2; round 3 is open"),
        ({"tasks": ("qqp",), "num_examples": {"qqp": 1}}, "claims the tasks qqp"),
        ({"num_examples": {"sst2": 0}}, "example counts"),
        ({"seen": {"qqp": 4}}, "trained on tasks that it does not return"),
        ({"num_examples": {"sst2": 5, "qqp": 5}}, "example counts"),
        ({"rows": None}, "token rows"),
        ({"delta": {ENCODER: torch.ones(3, 2)}}, "layer is torch.float32 (3, 2)"),
        ({"delta": {ENCODER: torch.ones(2, 2).double()}}, "torch.float64"),
        ({"delta": {ENCODER: torch.full((2, 2), float("nan"))}}, "not numbers"),
        ({"delta": {ENCODER: torch.full((2, 2), float("inf"))}}, "not numbers"),
        ({"delta": {Key("task:qqp", "heads.qqp.weight"): torch.ones(2)}}, "the head of qqp, which it was not sent"),
        ({"delta": {Key("fixed", "frozen"): torch.ones(1)}}, "frozen of scope fixed"),
    ],
)
def test_a_bad_update_is_refused_with_its_reason(change, reason):
    assert reason in (refusal(replace(GOOD, **change), expect(JOB)) or "")


ASKED = replace(
    JOB, tasks=("sst2", "qqp"), settings={"methods": {"adaptive_sharing": {"layers": ["layer"]}, "pcgrad": {}}}
)
TOLD = replace(GOOD, tasks=("sst2", "qqp"), num_examples={"sst2": 5, "qqp": 5})


def sending(name: str, values: dict | None = None, tensors: dict | None = None, update: Update = TOLD) -> Update:
    return replace(update, extra={name: Extra(values or {}, tensors or {})})


def test_inner_products_that_were_asked_for_are_accepted():
    products = {"layer": [[4.0, -6.0], [-6.0, 9.0]]}
    assert refusal(sending("adaptive_sharing", {"inner_products": products}), expect(ASKED)) is None


@pytest.mark.parametrize(
    "products",
    [
        {"other": [[1.0, 0.0], [0.0, 1.0]]},
        {"layer": [[-1.0, 0.0], [0.0, 1.0]]},
        {"layer": [[1.0, 0.5], [0.4, 1.0]]},
        # no two vectors of lengths 2 and 3 have a product over 6
        {"layer": [[4.0, 6.1], [6.1, 9.0]]},
        # not a number for every two tasks
        {"layer": [[1.0]]},
        {"layer": [[1.0, 0.0], [0.0]]},
        {"layer": [["nan", 0.0], [0.0, 1.0]]},
        {"layer": [["x", 0], [0, 1]]},
        {"layer": [[float("nan"), 0.0], [0.0, 1.0]]},
        {"layer": [[True, 0.0], [0.0, 1.0]]},
        {"layer": "xy"},
        {"layer": None},
        [1, 2],
    ],
)
def test_inner_products_that_no_vectors_have_are_refused(products):
    reason = refusal(sending("adaptive_sharing", {"inner_products": products}), expect(ASKED))
    assert "inner products" in (reason or "")


def test_inner_products_come_alone():
    for update in (
        sending("adaptive_sharing", {"inner_products": {}, "more": 1}),
        sending("adaptive_sharing", {}, {"slot": {ENCODER: torch.ones(2, 2)}}),
    ):
        assert "inner products" in (refusal(update, expect(ASKED)) or "")


@pytest.mark.parametrize("conflicts", [1.5, -0.1, "half", float("nan"), True, None, [0.5]])
def test_a_share_of_conflicts_that_is_none_is_refused(conflicts):
    assert refusal(sending("pcgrad", {"conflicts": 0.25}), expect(ASKED)) is None
    assert "conflicts" in (refusal(sending("pcgrad", {"conflicts": conflicts}), expect(ASKED)) or "")
    assert "conflicts" in (refusal(sending("pcgrad", {"conflicts": 0.25, "more": 1}), expect(ASKED)) or "")


@pytest.mark.parametrize("name", ["smart", "pcgrad", "nobody"])
def test_something_of_a_method_that_has_no_part_in_the_job_is_refused(name):
    told = sending(name, {"conflicts": 0.5}, update=GOOD)
    assert f"it sent something of {name}, which has no part in its job" == refusal(told, expect(JOB))


def test_something_of_a_method_that_sends_nothing_is_refused():
    job = replace(JOB, settings={"methods": {"fedprox": {"mu": 0.1}}})
    assert refusal(GOOD, expect(job)) is None
    for told in (
        sending("fedprox", {"mu": 1}, update=GOOD),
        sending("fedprox", {}, {"slot": {ENCODER: torch.ones(2, 2)}}, GOOD),
    ):
        assert "does not send" in (refusal(told, expect(job)) or "")


def test_what_a_method_is_not_prepared_for_costs_its_client_alone():
    reason = refusal(sending("adaptive_sharing", {"inner_products": {"layer": [True, 1.0]}}), expect(ASKED))
    assert reason == "what it sent of adaptive_sharing cannot be read: TypeError"


@pytest.fixture
def sender():
    """A method that may send anything: what is refused of it is refused for everybody."""
    name = "test_validate_sender"
    register(Capability(name, check_sent=lambda extra, tasks, options: None))
    yield name
    _REGISTERED.pop(name)


OTHER_HEAD = Key("task:qqp", "heads.qqp.weight")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (Key("all", "other"), torch.ones(2, 2), "of other of scope all, which is not its own"),
        (OTHER_HEAD, torch.ones(2), "of the head of qqp, which is not its own"),
        (Key("fixed", "frozen"), torch.ones(1), "of frozen of scope fixed, which is not its own"),
        (ENCODER, torch.ones(3, 2), "layer is (3, 2); (2, 2) was sent"),
        (ENCODER, torch.ones(2, 2, dtype=torch.int64), "layer is"),
        (ENCODER, torch.ones(2, 2, dtype=torch.bool), "layer is"),
        (ENCODER, torch.full((2, 2), float("nan")), "layer holds values that are not numbers"),
        (ENCODER, torch.full((2, 2), float("inf")), "layer holds values that are not numbers"),
        (ENCODER, torch.full((2, 2), 1e15), "layer holds values that are not numbers"),
    ],
    ids=["foreign", "head of another task", "fixed", "shape", "whole numbers", "mask", "nan", "inf", "huge"],
)
def test_tensors_that_a_method_cannot_have_are_refused_with_its_name(sender, key, value, reason):
    job = replace(JOB, weights={**WEIGHTS, OTHER_HEAD: torch.zeros(2)}, tasks=("sst2", "qqp"))
    known = expect(replace(job, settings={"methods": {sender: {}}}))
    assert refusal(sending(sender, {"any": 1}, {"slot": {ENCODER: torch.ones(2, 2)}}, GOOD), known) is None
    found = refusal(sending(sender, {}, {"slot": {key: value}}, GOOD), known) or ""
    assert reason in found
    assert f"{sender}.slot" in found


def test_the_length_of_an_update_is_bounded():
    # sqrt(4 * 1 + 2 * 1) = 2.449
    assert refusal(GOOD, expect(JOB), max_norm=2.45) is None
    assert "2.45 is over federation.max_update_norm 2.4" in (refusal(GOOD, expect(JOB), max_norm=2.4) or "")


QQP_HEAD = Key("task:qqp", "heads.qqp.weight")
BOTH = replace(JOB, tasks=("sst2", "qqp"), weights={**WEIGHTS, QQP_HEAD: torch.zeros(2)})


def test_a_tensor_of_a_task_that_the_update_does_not_claim_is_refused():
    # Its weight in the mean of that head would be 0 of 0.
    update = replace(GOOD, delta={**GOOD.delta, QQP_HEAD: torch.ones(2)})
    assert "the head of qqp, which is of none of its tasks, sst2" in (refusal(update, expect(BOTH)) or "")
    grouped = replace(BOTH, plan=SharingPlan((("heads.*", "task"), ("*", "group")), ({"sst2": "a", "qqp": "b"},)))
    layer = Key("group:b", "layer")
    grouped = replace(grouped, weights={layer: torch.zeros(2, 2), HEAD: torch.zeros(2)})
    update = replace(GOOD, delta={layer: torch.ones(2, 2), HEAD: torch.ones(2)})
    assert "layer of scope group:b, which is of none of its tasks" in (refusal(update, expect(grouped)) or "")


@pytest.mark.parametrize("delta", [{}, {ENCODER: torch.ones(2, 2)}, {HEAD: torch.ones(2)}])
def test_an_update_that_lacks_values_is_refused(delta):
    assert "did not return" in (refusal(replace(GOOD, delta=delta), expect(JOB)) or "")


def test_an_update_of_some_of_its_tasks_brings_their_values_only():
    assert refusal(GOOD, expect(BOTH)) is None


def test_a_finite_delta_whose_square_is_not_is_refused():
    # 1e20 squared is more than a 32-bit float holds: the second moment of FedAdam would be infinite for good.
    huge = replace(GOOD, delta={**GOOD.delta, ENCODER: torch.full((2, 2), 1e15)})
    assert "no training moves a value that far" in (refusal(huge, expect(JOB)) or "")


def test_a_client_counts_for_what_it_declared_at_most():
    known = expect(JOB, ClientInfo({"sst2": 4}))
    assert counted_examples(replace(GOOD, num_examples={"sst2": 10**6}), known) == {"sst2": 4}
    assert counted_examples(replace(GOOD, num_examples={"sst2": 3}), known) == {"sst2": 3}
    assert "declared no examples" in (refusal(GOOD, expect(JOB, ClientInfo({}))) or "")


def test_scores_in_a_training_answer_are_refused():
    assert "scores for a training job" in (refusal(replace(GOOD, sums={"sst2": {}}), expect(JOB)) or "")
