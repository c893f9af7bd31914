"""A run in numbers, from its events."""

import json

from fedmtl.runs.event_lines import from_json
from fedmtl.runs.summary import AverageSummary, Best, ClientFailure, summarize


def evaluation(number, task, **metrics):
    return {"event": "evaluation", "round": number, "task": task, "metrics": metrics, "marked": None}


def closed(number, **fields):
    return {"event": "round", "round": number, "bytes_up": 10, "bytes_down": 100, "seconds": 2.0, **fields}


TOLD = [
    {
        "event": "start",
        "mode": "federated",
        "synthetic": True,
        "tasks": {
            "sst2": {"kind": "classification", "metric": "accuracy"},
            "stsb": {"kind": "regression", "metric": "pearson"},
        },
    },
    {"event": "plan", "total": 4_386_000},
    evaluation(0, "sst2", accuracy=0.5, matthews=None),
    evaluation(0, "stsb", pearson=None, mse=4.0),
    evaluation(1, "sst2", accuracy=0.8, matthews=0.6),
    evaluation(1, "stsb", pearson=None, mse=2.0),
    closed(1, overall=0.9, classification=0.8),
    {"event": "failure", "round": 2, "client": "c3", "reason": "silence", "bytes_down": 5},
    evaluation(2, "sst2", accuracy=0.8, matthews=0.5),
    {**evaluation(2, "stsb", pearson=None, mse=3.0), "marked": "no better than the mean prediction"},
    closed(2, overall=None, classification=0.7),
    {"event": "end", "status": "done", "rounds": 2, "seconds": 5.0, "weights_sha256": "abc"},
]
EVENTS = [from_json(event) for event in TOLD]


def test_first_best_and_final_of_every_metric():
    tasks = summarize(EVENTS).tasks
    assert tasks["sst2"].start == {"accuracy": 0.5, "matthews": None}
    assert tasks["sst2"].final == {"accuracy": 0.8, "matthews": 0.5}
    # 0.8 was reached in rounds 1 and 2: the first one counts. An error is best where it is lowest.
    assert tasks["sst2"].best == {"accuracy": Best(0.8, 1), "matthews": Best(0.6, 1)}
    assert tasks["stsb"].best == {"pearson": None, "mse": Best(2.0, 1)}
    assert tasks["stsb"].marked == "no better than the mean prediction"


def test_first_best_and_final_of_the_averages():
    assert summarize(EVENTS).averages == {
        "overall": AverageSummary(0.9, Best(0.9, 1), None),
        "classification": AverageSummary(0.8, Best(0.8, 1), 0.7),
    }


def test_costs_are_added_up_over_the_rounds():
    summary = summarize(EVENTS, "demo")
    assert (summary.rounds, summary.bytes_up, summary.bytes_down) == (2, 20, 200)
    assert summary.seconds == 5.0
    assert summary.parameters == 4_386_000
    assert (summary.mode, summary.status, summary.synthetic, summary.name) == (
        "federated",
        "done",
        True,
        "demo",
    )
    assert (summary.overall, summary.classification) == (None, 0.7)
    assert summary.failures == (ClientFailure(2, "c3", "silence"),)


def test_passes_are_what_was_seen_over_what_there_is():
    told = [
        {"event": "start", "tasks": {"a": {"kind": "x", "metric": "y"}, "b": {"kind": "x", "metric": "y"}}},
        {"event": "data", "task": "a", "train": 40},
        {"event": "data", "task": "b", "train": 10},
        {"event": "round", "round": 0, "seen": {}},
        {"event": "round", "round": 1, "seen": {"a": 30}},
        {"event": "round", "round": 2, "seen": {"a": 30, "b": 5}},
    ]
    assert summarize([from_json(event) for event in told]).to_json()["passes"] == {"a": 1.5, "b": 0.5}
    # A run of before they were counted.
    assert summarize(EVENTS).tasks["sst2"].passes is None


def test_a_run_that_has_not_ended_is_unfinished():
    summary = summarize(EVENTS[:-1])
    assert (summary.status, summary.seconds, summary.weights_sha256) == ("unfinished", 4.0, None)
    assert summarize(EVENTS[:1]).tasks["sst2"].final == {}
    assert summarize([]).rounds == 0


def test_json_has_the_promised_keys():
    printed = json.loads(json.dumps(summarize(EVENTS, "demo").to_json()))
    keys = (
        "metrics further start best rounds seconds bytes_up bytes_down failures weights_sha256 mode name passes energy"
    )
    assert set(printed) == {*keys.split(), "averages"}
    assert printed["metrics"]["sst2"]["accuracy"] == 0.8
    assert printed["best"]["stsb"] == {"pearson": None, "mse": {"value": 2.0, "round": 1}}


def test_a_pass_that_was_not_scored_leaves_the_averages_of_the_one_before():
    # A distillation's unscored pass has no averages at all; a round that was not evaluated has averages of null.
    opened = [from_json(event) for event in (TOLD[0], closed(1, overall=0.9, classification=0.8))]
    assert summarize([*opened, from_json(closed(2))]).overall == 0.9
    assert summarize([*opened, from_json(closed(2, overall=None, classification=None))]).overall is None
