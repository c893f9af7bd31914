import pytest
import torch

from fedmtl.federation.aggregators.multi_krum import MultiKrum

from .made_updates import SHARED, TABLE, combined, head, update

ONE = {SHARED: torch.zeros(1)}


def krum(updates, share=0.34, before=ONE):
    return combined(MultiKrum(before, hostile=share), updates)


def test_of_three_clients_the_closest_pair_counts_by_its_examples():
    updates = [
        update("a", {SHARED: [1.0]}),
        update("b", {SHARED: [3.0]}, examples={"sst2": 3}),
        update("c", {SHARED: [-20.0]}, examples={"sst2": 100}),
    ]
    # a and b are 2 apart, c 21 and more: (1*1 + 3*3) / 4
    assert krum(updates)[SHARED].item() == pytest.approx(2.5)


def test_scores_are_sums_over_the_nearest_fellows():
    # Five clients, one hostile: two nearest. 0: 1 + 4; 1: 1 + 1; 2: 1 + 4; 5: 9 + 16; 9: 16 + 49. 9 goes.
    updates = [update(name, {SHARED: [step]}) for name, step in zip("abcde", (0.0, 1.0, 2.0, 5.0, 9.0), strict=True)]
    assert krum(updates)[SHARED].item() == pytest.approx(2.0)


def test_a_task_is_not_left_out_because_it_differs_from_others():
    updates = [
        *(update(name, {SHARED: [step]}) for name, step in zip("abc", (1.0, 1.0, -10.0), strict=True)),
        update("d", {SHARED: [-1.5]}, task="stsb"),
    ]
    # c is left out, and sst2 has the weight of three: (3 * 1 - 1.5) / 4
    assert krum(updates)[SHARED].item() == pytest.approx(0.375)


def test_the_only_client_of_a_task_is_clipped_to_twice_the_median_norm():
    updates = [
        *(update(name, {SHARED: [step]}) for name, step in zip("abc", (1.0, 1.0, 1.0), strict=True)),
        update("d", {SHARED: [-30.0]}, task="stsb"),
    ]
    assert krum(updates)[SHARED].item() == pytest.approx((3 * 1 - 2) / 4)


def test_distances_are_measured_in_every_scope_by_itself():
    before = {SHARED: torch.zeros(1), head("sst2"): torch.zeros(1)}
    updates = [
        update("a", {SHARED: [1.0], head("sst2"): [50.0]}),
        update("b", {SHARED: [1.0], head("sst2"): [2.0]}),
        update("c", {SHARED: [70.0], head("sst2"): [4.0]}),
    ]
    moved = krum(updates, before=before)
    assert (moved[SHARED].item(), moved[head("sst2")].item()) == (1.0, 3.0)


def test_a_client_that_is_left_out_takes_its_token_rows_with_it():
    before = {TABLE: torch.zeros(3, 1)}
    updates = [
        update("a", {TABLE: [[1.0], [3.0]]}, rows=[0, 1]),
        update("b", {TABLE: [[1.0]]}, rows=[0]),
        update("c", {TABLE: [[-9.0], [-9.0]]}, rows=[0, 2]),
    ]
    # As in a mean of a and b: b's missing row is a zero.
    assert krum(updates, before=before)[TABLE].flatten().tolist() == [1.0, 1.5, 0.0]


def test_with_a_share_that_makes_no_client_it_is_the_mean():
    updates = [update(name, {SHARED: [step]}) for name, step in zip("abc", (1.0, 2.0, 9.0), strict=True)]
    assert krum(updates, share=0.1)[SHARED].item() == pytest.approx(4.0)
    assert not MultiKrum(ONE, hostile=0.1).remember()
