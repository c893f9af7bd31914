import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.federation.aggregators.mean import combine, most_weights, per_example, shares_of
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import Key, SharingPlan

PLAN = SharingPlan((("heads.*", "task"), ("top", "group"), ("*", "all")), ({"qqp": "pair", "stsb": "pair"},))
ENCODER = Key("all", "bottom")
EQUAL = {"sst2": 1.0, "qqp": 1.0, "stsb": 1.0}


def head(task: str) -> Key:
    return Key(f"task:{task}", f"heads.{task}.weight")


def update(client: str, examples: dict[str, int], delta: dict[Key, float], rows=None) -> Update:
    tensors = {key: torch.tensor([value]) for key, value in delta.items()}
    return Update(1, client, tuple(examples), tensors, rows, examples, {})


def zeros(*keys: Key) -> dict[Key, torch.Tensor]:
    return {key: torch.zeros(1) for key in keys}


def test_encoder_is_the_mean_of_everybody_and_a_head_of_its_own_task():
    updates = [
        update("a", {"sst2": 1}, {ENCODER: 1.0, head("sst2"): 1.0}),
        update("b", {"sst2": 3}, {ENCODER: 5.0, head("sst2"): 4.0}),
        update("c", {"stsb": 4}, {ENCODER: 2.0, head("stsb"): 9.0}),
    ]
    mean = combine(updates, zeros(ENCODER, head("sst2"), head("qqp"), head("stsb")), PLAN, EQUAL)
    # encoder: (1*1 + 3*5 + 4*2) / 8 = 3; sst2: (1*1 + 3*4) / 4 = 3.25; stsb alone: 9; nobody has qqp
    assert mean[ENCODER].item() == 3.0
    assert mean[head("sst2")].item() == 3.25
    assert mean[head("stsb")].item() == 9.0
    assert head("qqp") not in mean


def test_a_client_with_two_tasks_counts_for_the_encoder_by_both_and_for_a_head_by_one():
    updates = [
        update("a", {"sst2": 1, "qqp": 5}, {ENCODER: 2.0, head("sst2"): 8.0, head("qqp"): 1.0}),
        update("b", {"sst2": 3}, {ENCODER: 5.0, head("sst2"): 4.0}),
    ]
    mean = combine(updates, zeros(ENCODER, head("sst2"), head("qqp")), PLAN, EQUAL)
    # encoder: (6*2 + 3*5) / 9 = 3; sst2: (1*8 + 3*4) / 4 = 5
    assert mean[ENCODER].item() == 3.0
    assert mean[head("sst2")].item() == 5.0
    assert mean[head("qqp")].item() == 1.0


def test_task_weights_multiply_the_examples():
    updates = [update("a", {"sst2": 2}, {ENCODER: 1.0}), update("b", {"stsb": 1}, {ENCODER: 4.0})]
    mean = combine(updates, zeros(ENCODER), PLAN, {"sst2": 1.0, "stsb": 4.0})
    # (2*1*1 + 1*4*4) / (2 + 4) = 3
    assert mean[ENCODER].item() == 3.0


def test_uniform_ignores_the_number_of_examples():
    updates = [update("a", {"sst2": 99}, {ENCODER: 1.0}), update("b", {"stsb": 1}, {ENCODER: 2.0})]
    assert combine(updates, zeros(ENCODER), PLAN, EQUAL, "uniform")[ENCODER].item() == 1.5


def test_tasks_alike_a_client_counts_by_its_part_of_its_task():
    updates = [
        update("a", {"sst2": 30}, {ENCODER: 1.0, head("sst2"): 1.0}),
        update("b", {"sst2": 10, "qqp": 8}, {ENCODER: 3.0, head("sst2"): 5.0, head("qqp"): 2.0}),
        update("c", {"stsb": 4}, {ENCODER: 10.0, head("stsb"): 9.0}),
    ]
    counted = per_example({"sst2": 1.0, "qqp": 1.0, "stsb": 2.0}, {"sst2": 40, "qqp": 8, "stsb": 4})
    assert counted == {"sst2": 1 / 40, "qqp": 1 / 8, "stsb": 2 / 4}
    mean = combine(updates, zeros(ENCODER, *map(head, EQUAL)), PLAN, counted, "tasks")
    # a 3/4 of sst2, b 1/4 of sst2 and all of qqp, c stsb with weight 2: (.75*1 + 1.25*3 + 2*10) / 4
    assert mean[ENCODER].item() == 6.125
    assert mean[head("sst2")].item() == 2.0


def test_a_task_that_nobody_was_asked_for_keeps_its_weight():
    assert per_example({"sst2": 3.0, "qqp": 5.0, "stsb": 2.0}, {"sst2": 6, "stsb": 0}) == {
        "sst2": 0.5,
        "qqp": 5.0,
        "stsb": 2.0,
    }


def test_a_group_counts_only_the_tasks_in_it():
    top = Key("group:pair", "top")
    updates = [
        update("a", {"sst2": 100, "qqp": 1}, {top: 6.0}),
        update("b", {"stsb": 2}, {top: 3.0}),
    ]
    # (1*6 + 2*3) / 3 = 4: the hundred sst2 examples have no say in the pair group
    assert combine(updates, zeros(top), PLAN, EQUAL)[top].item() == 4.0


def test_a_missing_token_row_is_a_zero_at_full_weight():
    table = Key("all", "table")
    before = {table: torch.zeros(3, 1)}
    sliced = Update(1, "a", ("sst2",), {table: torch.tensor([[4.0], [8.0]])}, np.array([0, 2]), {"sst2": 1}, {})
    whole = Update(1, "b", ("sst2",), {table: torch.tensor([[2.0], [2.0], [2.0]])}, None, {"sst2": 1}, {})
    mean = combine([sliced, whole], before, PLAN, EQUAL)[table]
    # row 0: (4+2)/2, row 1: (0+2)/2, row 2: (8+2)/2
    assert mean.flatten().tolist() == [3.0, 1.0, 5.0]


def test_order_of_arrival_does_not_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    updates = [
        Update(1, f"c{i}", ("sst2",), {ENCODER: torch.randn(1000, generator=generator)}, None, {"sst2": i + 1}, {})
        for i in range(7)
    ]
    before = {ENCODER: torch.zeros(1000)}
    forward = combine(updates, before, PLAN, EQUAL)[ENCODER]
    assert torch.equal(forward, combine(reversed(updates), before, PLAN, EQUAL)[ENCODER])


@given(
    weights=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12),
    share=st.floats(0.05, 1.0),
)
def test_a_share_is_never_passed_where_there_are_enough_clients(weights, share):
    cap = most_weights({"all": weights}, share)["all"]
    cut = [min(weight, cap) for weight in weights]
    largest = max(cut) / sum(cut)
    if len(weights) * share >= 1:
        assert largest <= share * (1 + 1e-9)
    else:
        assert largest == pytest.approx(1 / len(weights))
    if max(weights) <= share * sum(weights):
        assert cut == weights


def test_shares_are_of_the_weights_of_those_that_returned_the_scope():
    # The encoder: 1 + 3 + 4 = 8; sst2's head: 1 + 3 = 4; of a scope where nobody counts there is no share.
    weights = {
        "a": {"all": 1.0, "task:sst2": 1.0},
        "b": {"all": 3.0, "task:sst2": 3.0},
        "c": {"all": 4.0, "task:stsb": 0.0},
    }
    assert shares_of(weights) == {
        "a": {"all": 0.125, "task:sst2": 0.25},
        "b": {"all": 0.375, "task:sst2": 0.75},
        "c": {"all": 0.5},
    }
