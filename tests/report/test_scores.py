import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.report.record import summarize, trend


def test_best_is_the_earliest_of_equals_and_final_the_last():
    summary = summarize({0: 0.5, 1: 0.7, 2: 0.7, 3: 0.6})
    assert (summary.start, summary.best, summary.best_round, summary.final, summary.final_round) == (
        0.5,
        0.7,
        1,
        0.6,
        3,
    )


def test_undefined_values_are_never_best_but_may_be_final():
    summary = summarize({0: None, 2: 0.4, 4: None})
    assert (summary.start, summary.best, summary.best_round) == (None, 0.4, 2)
    assert (summary.final, summary.final_round) == (None, 4)


def test_nothing_evaluated_has_no_scores():
    summary = summarize({})
    assert summary.start is summary.best is summary.final is summary.trend is None


def test_trend_is_the_least_squares_change_over_the_window():
    # Rounds 1 to 4, centred x = -1.5, -.5, .5, 1.5 with squares summing to 5:
    # slope = (-1.5 * .70 - .5 * .75 + .5 * .78 + 1.5 * .80) / 5 = .033, over 3 rounds .099.
    # Scatter .00023, error sqrt(.00023 / 2 / 5) = .0048; .033 / .0048 = 6.9 > 4.303: rising.
    found = trend({0: 0.1, 1: 0.70, 2: 0.75, 3: 0.78, 4: 0.80})
    assert found is not None
    assert (found.word, found.first, found.last) == ("rising", 1, 4)
    assert found.change == pytest.approx(0.099)


def test_a_slope_within_the_scatter_is_a_number_without_a_word():
    # slope = (-1.5 * .70 - .5 * .80 + .5 * .70 + 1.5 * .80) / 5 = .02, fitted .72 .74 .76 .78,
    # scatter 4 terms .0004 + .0036 + .0036 + .0004 = .008, error sqrt(.008 / 2 / 5) = .028: 0.7 < 4.303.
    found = trend({1: 0.70, 2: 0.80, 3: 0.70, 4: 0.80})
    assert found is not None
    assert found.word == ""
    assert found.change == pytest.approx(0.06)
    # Over 3 rounds: 3 * sqrt(.0008) = .0849.
    assert found.error == pytest.approx(3 * 0.0008**0.5)


def test_tiny_steady_change_has_no_word():
    # .001 a round over 3 rounds is .003, below .005.
    found = trend({1: 0.700, 2: 0.701, 3: 0.702, 4: 0.703})
    assert found is not None
    assert found.word == ""


def test_window_is_the_last_third():
    # 15 rounds rise, then fall over the last 5 = 15 / 3.
    scores = {at: 0.5 + 0.01 * min(at, 11) - 0.02 * max(0, at - 11) for at in range(1, 16)}
    found = trend(scores)
    assert found is not None
    assert (found.word, found.first, found.last) == ("falling", 11, 15)


def test_three_rounds_are_too_few_for_a_trend():
    assert trend({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}) is None


@given(st.dictionaries(st.integers(0, 60), st.none() | st.floats(0, 1), max_size=40))
def test_summary_is_ordered(scores):
    summary = summarize(scores)
    for value in (summary.start, summary.final):
        assert value is None or (summary.best is not None and value <= summary.best)
