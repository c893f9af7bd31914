"""The check that every kill is held to, and a few kills; `benchmarks/kills.py` makes a hundred."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import kills
from kills import Outcome, Trial, run_trials

CALM = Outcome(
    sha="abc",
    states={"a": "round-0002 123"},
    rounds=[0, 1, 2],
    rows=[0, 1, 2],
    updates=[(1, "a"), (1, "b"), (2, "a"), (2, "b")],
    failures=[],
)


def compared(**changes) -> Trial:
    trial = Trial("config", "machine", ["worker"])
    trial.compare(replace(CALM, **changes), CALM)
    return trial


def test_the_same_outcome_is_clean():
    assert compared().is_clean


@pytest.mark.parametrize(
    ("changes", "name", "count"),
    [
        ({"sha": "abd"}, "is_same_sha", False),
        ({"states": {"a": "none"}}, "are_same_states", False),
        ({"rounds": [0, 2]}, "rounds_lost", 1),
        ({"rows": [0, 1]}, "rounds_lost", 1),
        ({"rounds": [0, 1, 1, 2]}, "rounds_doubled", 1),
        ({"rows": [0, 1, 2, 2]}, "rounds_doubled", 1),
        ({"updates": CALM.updates[:-1]}, "updates_lost", 1),
        ({"updates": [*CALM.updates, (2, "b")]}, "updates_doubled", 1),
        ({"failures": ["round 1, a: died"]}, "failures", ["round 1, a: died"]),
    ],
)
def test_every_difference_counts(changes, name, count):
    trial = compared(**changes)
    assert getattr(trial, name) == count
    assert not trial.is_clean


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_six_kills_leave_no_trace(tmp_path, monkeypatch):
    # All that stays at clients and at the server, in one config.
    everything = [*kills.CONFIGS["personal"], *kills.CONFIGS["int8"], *kills.CONFIGS["fedadam"]]
    monkeypatch.setitem(kills.CONFIGS, "everything", everything)
    trials = run_trials(["everything"], ["machine", "deployment"], 6, 0, tmp_path, lambda trial: None, most_kills=3)
    assert [vars(trial) for trial in trials if not trial.is_clean] == []
    assert {trial.setup for trial in trials} == {"machine", "deployment"}
    assert sum(len(trial.kills) for trial in trials) >= 6
