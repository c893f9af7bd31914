from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.federation.messages import ClientInfo, Job, Update
from fedmtl.federation.validate import counted_examples, expect, refusal
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan

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


ASKED = replace(JOB, tasks=("sst2", "qqp"), settings={"measured_layers": ["layer"]})
TOLD = replace(GOOD, tasks=("sst2", "qqp"), num_examples={"sst2": 5, "qqp": 5})


def test_inner_products_that_were_asked_for_are_accepted():
    assert refusal(replace(TOLD, inner_products={"layer": [[4.0, -6.0], [-6.0, 9.0]]}), expect(ASKED)) is None


@pytest.mark.parametrize(
    "products",
    [
        {"other": [[1.0, 0.0], [0.0, 1.0]]},
        {"layer": [[-1.0, 0.0], [0.0, 1.0]]},
        {"layer": [[1.0, 0.5], [0.4, 1.0]]},
        # no two vectors of lengths 2 and 3 have a product over 6
        {"layer": [[4.0, 6.1], [6.1, 9.0]]},
    ],
)
def test_inner_products_that_no_vectors_have_are_refused(products):
    assert "inner products" in (refusal(replace(TOLD, inner_products=products), expect(ASKED)) or "")


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
