from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.federation.messages import Job, Update
from fedmtl.federation.validate import expect, refusal
from fedmtl.model.keys import Key
from fedmtl.model.plan import SharingPlan

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
