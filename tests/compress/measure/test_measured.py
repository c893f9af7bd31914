"""Retention, and what the numbers alone would hide."""

import pytest

from compress.measure.made_up import make_measured
from fedmtl.compress.measure.measured import Teacher, mean, remarks, retention, retentions


def test_retention_is_the_share_of_a_score_above_nothing():
    assert retention(0.72, 0.9) == pytest.approx(0.8)
    assert retention(0.5, 0.0) is None
    assert retention(0.5, -0.1) is None
    assert retention(None, 0.5) is None
    assert retention(-0.1, 0.5) == pytest.approx(-0.2)


def test_a_mean_needs_every_task():
    kept = retentions(make_measured("a", {"x": 0.8, "y": 0.6}), Teacher("t", {"x": 1.0, "y": 0.8}))
    # (0.8 + 0.75) / 2
    assert mean(kept) == pytest.approx(0.775)
    assert mean({"x": 0.8, "y": None}) is None
    assert mean({}) is None


def test_a_score_at_the_majority_class_is_named():
    floors = {"mrpc": 0.6838}
    measured = [
        make_measured("t", {"mrpc": 0.6838}, floors=floors),
        make_measured("s", {"mrpc": 0.70}, floors=floors),
        make_measured("u", {"mrpc": 0.60}, floors=floors),
    ]
    assert remarks(measured, Teacher("t", measured[0].main_scores)) == [
        "mrpc accuracy equals that of the majority class, 0.684: t",
        "mrpc accuracy is below that of the majority class, 0.684: u",
        "mrpc: t is at the majority class, so retention above 1 says little: s",
    ]
    assert remarks(measured[1:2], Teacher("t", {"mrpc": 0.69})) == []


def test_undefined_scores_other_data_and_a_busy_machine_are_named():
    measured = [
        make_measured("a", {"x": None}, examples=100),
        make_measured("b", {"x": 0.9}, examples=50, waiting=0.3),
    ]
    assert remarks(measured, Teacher("a", {"x": None})) == [
        "x has no accuracy, why: a",
        "x: scored on different data (50 and 100 examples)",
        "x: a has no score above 0, so there is no retention",
        "the machine was busy: up to 30% of the time went into waiting for a core; measure again",
    ]
