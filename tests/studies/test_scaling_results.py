"""Curves by hand: chance is .5, so up to .55 is at chance."""

import pytest

from fedmtl_studies.results import Spread
from fedmtl_studies.scaling_results import Setup, chance_of, collapse, fate, fate_words, reached_value, rounds_to
from studies.small_results import known, result


def words(found):
    return collapse(found, "tiny", "sentiment").words


def test_chance_is_the_most_frequent_label():
    # 6 of 10 rows are of the first label, whatever was answered
    assert chance_of([[1, 5], [0, 4]]) == 0.6


def test_whether_a_run_ever_left_chance():
    assert fate(result(0.5, 0.7, 0.8), 2) == "no"
    assert fate(result(0.9, 0.5, 0.55), 2) == "never left it"
    assert fate(result(0.5, 0.7, 0.54), 2) == "fell back to it"


def test_rounds_are_counted_to_nine_tenths_of_the_baseline_at_the_fixed_round():
    # .9 x .8 = .72; what the baseline has later does not count, nor round 0
    baseline = result(0.5, 0.75, 0.8, 0.99)
    assert rounds_to(result(0.9, 0.6, 0.71, 0.72), baseline, 2) == 3
    assert rounds_to(result(0.5, 0.6, 0.7, 0.71), baseline, 2) == "failed"
    assert rounds_to(baseline, baseline, 2) == 1


def test_rounds_are_void_where_the_baseline_is_at_chance():
    assert rounds_to(result(0.5, 0.9), result(0.5, 0.55), 1) == "void"
    assert rounds_to(result(0.5, 0.9), result(0.5, 0.56), 1) == 1


def test_seeds_make_one_value_where_all_have_one():
    assert reached_value({0: 2, 1: 3}, 9) == Spread(2.5, pytest.approx(0.5**0.5), 2)
    assert reached_value({0: 2, 1: "failed"}, 9) == "not in 9 (1 of 2 seeds)"
    assert reached_value({0: "failed"}, 9) == "not in 9"
    assert reached_value({0: 2, 1: "void"}, 9) == "void"
    assert reached_value({}, 9) is None
    assert fate_words({0: "no", 1: "never left it"}) == "never left it (1 of 2 seeds)"


def test_a_seed_has_the_baseline_of_the_same_seed():
    # targets .9 x .8 = .72 and .9 x .6 = .54
    found = known({1: [result(0.5, 0.8, 0.8), result(0.5, 0.6, 0.6)], 2: [result(0.5, 0.6, 0.6, 0.7)] * 2})
    assert found.reached(Setup("tiny", "sentiment", 2)) == {0: "failed", 1: 1}


def test_a_collapse_is_told_with_where_and_how():
    good, late, never = result(0.5, 0.8, 0.8), result(0.5, 0.5, 0.5, 0.8), result(0.5, 0.5, 0.5, 0.5)
    found = known({1: good, 2: result(0.5, 0.7, 0.6, 0.6), 4: late, 8: never})
    assert collapse(found, "tiny", "sentiment").counts == (4, 8)
    assert words(found) == "at chance after 2 rounds with 4, 8 clients (never left it); after 3 still with 8"
    back = result(0.5, 0.8, 0.5, 0.8)
    assert words(known({1: good, 2: back})) == (
        "at chance after 2 rounds with 2 clients (fell back to it); after 3 with none"
    )


def test_one_seed_at_chance_is_told():
    found = known({1: [result(0.5, 0.8, 0.8)] * 2, 4: [result(0.5, 0.8, 0.8, 0.8), result(0.5, 0.5, 0.5, 0.5)]})
    assert words(found) == (
        "at chance after 2 rounds with 4 clients (never left it (1 of 2 seeds)); after 3 still with 4"
    )


def test_no_collapse_says_how_low_it_came():
    found = known({1: result(0.5, 0.8, 0.8), 2: result(0.5, 0.7, 0.61, 0.7), 4: result(0.5, 0.6, 0.7, 0.7)})
    assert words(found) == "no collapse with up to 4 clients after 2 rounds; lowest .610 with 2"


def test_a_baseline_at_chance_proves_nothing():
    found = known({1: result(0.5, 0.5, 0.5), 2: result(0.5, 0.5, 0.5, 0.5)})
    assert words(found).startswith("at chance with one client already (never left it)")
    assert collapse(known({1: [None], 2: [None]}), "tiny", "sentiment") is None
