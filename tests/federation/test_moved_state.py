import numpy as np
import torch

from fedmtl.federation.client import follow_plan
from fedmtl.federation.filters.error_feedback import RESIDUAL, RESIDUAL_ROWS
from fedmtl.federation.messages import Codecs
from fedmtl.sharing.plan import Extra, Key, SharingPlan

from .filters.leaving import leave

SHARED = SharingPlan((("heads.*", "task"), ("*", "all")), ({"a": "left", "b": "left", "c": "right"},))
SPLIT, GROUPED = SHARED.with_rule("top.*", "task"), SHARED.with_rule("top.*", "group")


def key(scope: str, name: str = "top.w") -> Key:
    return Key(scope, name)


def value(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def kept(slots, plan, tasks=("a", "b")):
    return {
        slot: {k: v.tolist() for k, v in own.items()} for slot, own in follow_plan(slots, plan, tasks, "me").items()
    }


def test_what_fits_the_plan_stays_as_it_is():
    slots = {
        RESIDUAL: {key("all"): value(1.0), key("all", "low.w"): value(2.0)},
        "values": {Key("client:me", "own.w"): value(3.0)},
    }
    plan = SHARED.with_rule("own.*", "client")
    assert follow_plan(slots, plan, ("a",), "me") == slots
    # task b rests: what it kept is still its own
    resting = {RESIDUAL: {key("task:b"): value(1.0)}}
    assert follow_plan(resting, SPLIT, ("a",), "me") == resting


def test_a_split_leaves_the_state_to_every_copy():
    slots = {"optimizer.exp_avg": {key("all"): value(1.0, 2.0), key("all", "low.w"): value(5.0)}}
    assert kept(slots, SPLIT) == {
        "optimizer.exp_avg": {
            key("all", "low.w"): [5.0],
            key("task:a"): [1.0, 2.0],
            key("task:b"): [1.0, 2.0],
        }
    }


def test_a_merge_gets_the_mean_of_what_went_into_it():
    slots = {RESIDUAL: {key("task:a"): value(1.0, 2.0), key("task:b"): value(3.0, 6.0)}}
    assert kept(slots, SHARED) == {RESIDUAL: {key("all"): [2.0, 4.0]}}


def test_a_group_gets_that_of_its_own_tasks_only():
    slots = {RESIDUAL: {key("task:a"): value(1.0), key("task:b"): value(3.0), key("task:c"): value(9.0)}}
    assert kept(slots, GROUPED, ("a", "b", "c")) == {RESIDUAL: {key("group:left"): [2.0], key("group:right"): [9.0]}}


def test_what_belonged_to_a_head_that_is_fixed_now_is_dropped():
    slots = {RESIDUAL: {Key("task:a", "heads.a.w"): value(1.0)}}
    assert kept(slots, SHARED.with_rule("heads.a.*", "fixed")) == {RESIDUAL: {}}


def test_token_rows_that_differ_cannot_be_merged_and_equal_ones_can():
    """The residual of a merged table whose rows are gone is not sent, though its shape fits."""
    a, b, merged = (key(scope, "table") for scope in ("task:a", "task:b", "all"))
    plan = SharingPlan((("*", "all"),))
    codecs = Codecs(up="topk", topk_share=1.0)

    def sent(rows_of_b):
        slots = {
            RESIDUAL: {a: torch.tensor([[1.0]]), b: torch.tensor([[3.0]])},
            RESIDUAL_ROWS: {a: torch.tensor([4]), b: torch.tensor([rows_of_b])},
        }
        moved = Extra(tensors=follow_plan(slots, plan, ("a", "b"), "me"))
        delta, stored = leave({merged: torch.tensor([[0.5]])}, codecs, moved, np.array([4]))
        assert stored.slot(RESIDUAL_ROWS)[merged].tolist() == [4]
        return delta[merged].tolist()

    assert sent(5) == [[0.5]]
    assert sent(4) == [[2.5]]


def test_a_residual_without_rows_is_gone_for_good():
    """It would be merged with that of another table later, under the rows of that one."""
    resting = Extra(tensors={RESIDUAL: {key("task:b", "table"): torch.tensor([[3.0]])}})
    _, stored = leave({key("task:a", "w"): torch.ones(2, 2)}, Codecs(up="int8"), resting, np.array([4]))
    assert key("task:b", "table") not in stored.slot(RESIDUAL)


def test_nothing_lost_to_the_wire_is_lost_to_a_split():
    codecs = Codecs(up="topk", topk_share=0.5)
    delta = {key("all"): torch.arange(64.0).reshape(8, 8)}
    sent, stored = leave(delta, codecs)
    missing = delta[key("all")] - sent[key("all")]
    assert missing.abs().sum() > 0
    moved = follow_plan(stored.tensors, SPLIT, ("a",), "me")
    still = {key("task:a"): torch.zeros(8, 8)}
    again, _ = leave(still, Codecs(up="topk", topk_share=1.0), Extra(tensors=moved))
    assert torch.equal(again[key("task:a")], missing)
    assert set(moved[RESIDUAL]) == {key("task:a")}
