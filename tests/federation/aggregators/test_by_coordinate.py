import pytest
import torch

from fedmtl.federation.aggregators.by_coordinate import CoordinateMedian, TrimmedMean, num_hostile

from .made_updates import SHARED, TABLE, combined, head, update


def test_every_entry_is_the_median_of_the_tasks_clients():
    updates = [
        update("a", {SHARED: [1.0, 9.0]}),
        update("b", {SHARED: [2.0, 7.0]}),
        update("c", {SHARED: [-50.0, 8.0]}),
    ]
    assert combined(CoordinateMedian({SHARED: torch.zeros(2)}), updates)[SHARED].tolist() == [1.0, 8.0]


def test_of_four_clients_it_is_the_mean_of_the_middle_two():
    updates = [update(name, {SHARED: [step]}) for name, step in zip("abcd", (1.0, 2.0, 4.0, 99.0), strict=True)]
    assert combined(CoordinateMedian({SHARED: torch.zeros(1)}), updates)[SHARED].tolist() == [3.0]


def test_a_trimmed_mean_leaves_out_the_share_at_either_end():
    updates = [update(name, {SHARED: [step]}) for name, step in zip("abcde", (1.0, -90.0, 2.0, 6.0, 90.0), strict=True)]
    # A fifth of five is one: (1 + 2 + 6) / 3. Two fifths are two: the median.
    for share, expected in ((0.2, 3.0), (0.4, 2.0), (0.19, 9 / 5)):
        result = combined(TrimmedMean({SHARED: torch.zeros(1)}, hostile=share), updates)
        assert result[SHARED].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("clients", "share", "expected"), [(3, 0.34, 1), (3, 1 / 3, 1), (10, 0.3, 3), (4, 0.49, 1), (5, 0.1, 0)]
)
def test_the_hostile_are_a_share_and_fewer_than_half(clients, share, expected):
    assert num_hostile(clients, share) == expected


def test_clients_are_compared_within_their_task_and_tasks_are_averaged():
    # sst2: median of 1, 2 and -50 is 1, for 3 of 5 examples; stsb has one client, whose norm 6 is over twice the
    # median of 1, 2, 6 and 50, which is 2: 4. (3 * 1 + 2 * 4) / 5
    updates = [
        *(update(name, {SHARED: [step]}) for name, step in zip("abc", (1.0, 2.0, -50.0), strict=True)),
        update("d", {SHARED: [6.0]}, examples={"stsb": 2}),
    ]
    assert combined(CoordinateMedian({SHARED: torch.zeros(1)}), updates)[SHARED].item() == pytest.approx(11 / 5)


def test_a_client_with_two_tasks_is_compared_in_both():
    # b has one example of each. sst2: a, b, c with 1, 1 and 1 of weight, median 2; stsb: b, d, e, median 3.
    updates = [
        update("a", {SHARED: [1.0]}),
        update("b", {SHARED: [2.0]}, examples={"sst2": 1, "stsb": 1}),
        update("c", {SHARED: [9.0]}),
        update("d", {SHARED: [3.0]}, task="stsb"),
        update("e", {SHARED: [4.0]}, task="stsb"),
    ]
    assert combined(CoordinateMedian({SHARED: torch.zeros(1)}), updates)[SHARED].item() == pytest.approx(2.5)


def test_of_two_clients_both_are_clipped_to_twice_the_smaller_norm():
    updates = [update("a", {head("sst2"): [1.0]}), update("b", {head("sst2"): [-10.0]})]
    # (1 - 2) / 2
    assert combined(CoordinateMedian({head("sst2"): torch.zeros(1)}), updates)[head("sst2")].item() == -0.5


def test_a_token_row_is_combined_over_those_who_returned_it():
    before = {TABLE: torch.zeros(4, 1)}
    updates = [
        update("a", {TABLE: [[1.0], [4.0], [3.0]]}, rows=[0, 1, 2]),
        update("b", {TABLE: [[2.0], [5.0]]}, rows=[0, 1]),
        update("c", {TABLE: [[-60.0], [6.0]]}, rows=[0, 1]),
        update("d", {TABLE: [[3.0]]}, rows=[0]),
    ]
    moved = combined(CoordinateMedian(before), updates)[TABLE].flatten()
    # Row 0: the median of 1, 2, -60 and 3 is 1.5. Row 1: of 4, 5 and 6 it is 5, by three of four. Row 2: one client, 3,
    # which is under the median norm of the rows 1 2 3 3 4 5 6 60, which is 3; a quarter of it. Nobody returned row 3.
    assert moved.tolist() == pytest.approx([1.5, 3.75, 0.75, 0.0])


def test_a_row_of_one_client_is_clipped_to_the_median_norm_of_the_rows():
    before = {TABLE: torch.zeros(3, 1)}
    updates = [
        update("a", {TABLE: [[1.0], [2.0]]}, rows=[0, 1]),
        update("b", {TABLE: [[1.0], [2.0]]}, rows=[0, 1]),
        update("c", {TABLE: [[1.0], [-30.0]]}, rows=[0, 2]),
    ]
    # The norms are 1 1 1 2 2 30, their lower median 1. Row 1: two clients, each clipped to 1: 2 / 3. Row 2: -1 / 3.
    moved = combined(CoordinateMedian(before), updates)[TABLE].flatten()
    assert moved.tolist() == pytest.approx([1.0, 2 / 3, -1 / 3])


def test_rows_and_whole_tables_give_the_same_where_all_rows_are_used():
    whole = [update(name, {TABLE: [[step], [-step]]}) for name, step in zip("abc", (1.0, 2.0, 9.0), strict=True)]
    sliced = [
        update(name, {TABLE: [[step], [-step]]}, rows=[0, 1]) for name, step in zip("abc", (1.0, 2.0, 9.0), strict=True)
    ]
    three = {TABLE: torch.zeros(3, 1)}
    one = combined(CoordinateMedian({TABLE: torch.zeros(2, 1)}), whole)[TABLE]
    assert torch.equal(one, combined(CoordinateMedian(three), sliced)[TABLE][:2])


def test_nothing_is_remembered():
    assert not CoordinateMedian({}).remember()
    assert not TrimmedMean({}, hostile=0.34).remember()
