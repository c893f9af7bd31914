import math

import pytest

from fedmtl.report.formats import change, count, duration, number, percent, score, size, tick


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.9123, ".912"),
        (1.0, "1.000"),
        (0.0, ".000"),
        (-0.034, "−.034"),
        (-0.0001, ".000"),
        (12.5, "12.500"),
        (None, "–"),
    ],
)
def test_scores_have_three_decimals_and_no_leading_zero(value, shown):
    assert score(value) == shown


def test_changes_have_a_sign():
    assert [change(0.0213), change(-0.0213), change(0.0)] == ["+.021", "−.021", ".000"]


def test_only_finite_numbers_are_numbers():
    assert [number(value) for value in (1, 0.5, None, "1", True, math.nan, math.inf)] == [
        1.0,
        0.5,
        *[None] * 5,
    ]


def test_sizes_have_three_digits():
    assert [size(value) for value in (0, 999, 999_600, 4_210_000, 12e9, None)] == [
        "0 B",
        "999 B",
        "1 MB",
        "4.21 MB",
        "12 GB",
        "–",
    ]


def test_shares_too_small_to_show_are_not_called_zero():
    assert [percent(value) for value in (0.0, 0.0001, 0.0006, 0.906)] == ["0.0%", "<0.1%", "0.1%", "90.6%"]


def test_durations_are_said_in_the_unit_that_fits():
    # 725 s = 12 * 60 + 5; 11520 s = 3 * 3600 + 12 * 60
    assert [duration(value) for value in (0.42, 83.4, 725, 11_520)] == [
        "0.42 s",
        "83 s",
        "12 min 5 s",
        "3 h 12 min",
    ]


def test_ticks_have_the_decimals_of_their_step():
    assert [tick(0.75, 0.05), tick(-0.2, 0.2), tick(0.0, 0.1), tick(4000, 1000)] == [
        ".75",
        "−.2",
        "0",
        "4,000",
    ]


def test_counts_have_separators():
    assert [count(12_345), count(None)] == ["12,345", "–"]
