"""What a run says of itself, from events that are written by hand."""

from dataclasses import replace

import pytest

from fedmtl.runs.events import (
    Averages,
    BaselineEvent,
    DataEvent,
    EndEvent,
    EvaluationEvent,
    RoundEvent,
    StartEvent,
    TaskFacts,
)
from fedmtl.runs.verdicts import standard_error, verdicts

SST2 = TaskFacts(kind="classification", metric="accuracy", labels=["0", "1"])
STSB = TaskFacts(kind="regression", metric="pearson", score_range=[0.0, 5.0])


def run_of(values, baselines=(), losses=(), trained=(), keep="last", **data):
    """A run of sst2 with these accuracies from round 0 on, scored on 400 examples."""
    events = [StartEvent(tasks={"sst2": SST2}), DataEvent(task="sst2", validation=400)]
    events += [
        BaselineEvent(task="sst2", name=name, metrics={"accuracy": value}, examples=400) for name, value in baselines
    ]
    for number, value in enumerate(values):
        loss = losses[number] if losses else None
        metrics = {"accuracy": value}
        events.append(EvaluationEvent(round=number, task="sst2", metrics=metrics, examples=400, loss=loss))
        fell = {"sst2": trained[number]} if trained and number else {}
        events.append(RoundEvent(round=number, losses=fell, averages=Averages(overall=value)))
    return [*events, EndEvent(status="done", keep=keep)]


def codes(*given, **more):
    return [verdict.code for verdict in verdicts(run_of(*given, **more), "first")]


def test_standard_errors_are_those_of_the_books():
    # A share of .5 of 100 examples: sqrt(.25 / 100); a correlation of .6 of 103: (1 - .36) / sqrt(100).
    assert standard_error("accuracy", 0.5, 100) == pytest.approx(0.05)
    assert standard_error("pearson", 0.6, 103) == pytest.approx(0.064)
    assert standard_error("mse", 2.0, 200) == pytest.approx(0.2)
    assert standard_error("accuracy", 1.0, 100) > 0
    assert standard_error("words", 0.5, 100) is None
    assert standard_error("accuracy", 0.5, 3) is None


def test_a_loss_within_the_standard_error_is_none():
    # Of two accuracies of .8 on 400 examples each, the difference has the standard error .02 * sqrt(2) = .028.
    assert codes([0.5, 0.8], [("tfidf", 0.82)]) == ["ahead"]
    assert codes([0.5, 0.8], [("tfidf", 0.84)]) == ["baseline"]


def test_a_run_has_to_be_clearly_better_than_a_constant():
    (found,) = verdicts(run_of([0.5, 0.52], [("constant", 0.5)]))
    assert found.words.startswith("sst2: accuracy 0.520 is not clearly better than the majority class (0.500)")
    assert codes([0.5, 0.56], [("constant", 0.5)]) == ["ahead"]


def test_all_baselines_that_win_are_in_one_line_the_best_first():
    (found,) = verdicts(run_of([0.5, 0.6], [("constant", 0.5), ("tfidf", 0.7), ("frozen", 0.8)]))
    assert (
        "worse than the frozen encoder with a linear model (0.800) and TF-IDF with a linear model (0.700)"
        in found.words
    )


@pytest.mark.parametrize(
    ("values", "losses", "trained", "marked", "tip"),
    [
        ([0.6, 0.6, 0.6], [0.7, 0.9, 1.2], [0, 0.5, 0.4], None, "its loss grew: try a tenth"),
        ([0.7, 0.6, 0.6], [0.7, 0.7, 0.7], [0, 0.5, 0.4], None, "try a smaller training.learning_rate"),
        ([0.6] * 3, [0.7] * 3, [0, 0.5, 0.4], "gives one label", "its answers hardly differ after 2 rounds: train for"),
        ([0.6] * 5, [0.7] * 5, [0, 0.5, 0.5, 0.4, 0.4], "gives one label", "hardly differ: training.learning_rate is"),
        ([0.6, 0.6, 0.6], [0.7, 0.7, 0.7], [0, 0.69, 0.68], None, "it hardly learned: try a larger"),
        ([0.6, 0.62, 0.65], [0.7, 0.6, 0.6], [0, 0.6, 0.5], None, "it was still improving: try more"),
        ([0.6, 0.65, 0.64], [0.7, 0.6, 0.6], [0, 0.6, 0.5], None, "try another training.learning_rate"),
    ],
)
def test_what_to_try_follows_from_what_the_losses_did(values, losses, trained, marked, tip):
    events = run_of(values, [("tfidf", 0.9)], losses, trained)
    last = max(at for at, event in enumerate(events) if isinstance(event, EvaluationEvent))
    events[last] = replace(events[last], marked=marked)
    assert tip in verdicts(events)[0].words.split("; ")[1]


def test_how_far_a_run_is_ahead_is_one_line():
    (found,) = verdicts(run_of([0.5, 0.9], [("constant", 0.5), ("tfidf", 0.8)]))
    assert (
        found.words == "against the best baseline: sst2 accuracy 0.900 is +0.100 to TF-IDF with a linear model (0.800)"
    )


def test_a_run_that_is_worse_than_untrained_says_so():
    found = verdicts(run_of([0.8, 0.7]), "first")
    assert [one.code for one in found] == ["round_0"]
    assert "worse than before training (0.800); try a smaller training.learning_rate" in found[0].words


def test_a_better_round_is_named_with_how_to_open_it():
    (found,) = verdicts(run_of([0.5, 0.9, 0.8]), "first")
    assert (found.code, "--round best" in found.words) == ("best_round", True)
    assert "worse than after round 1 (0.900); `fedmtl evaluate first --round best`" in found.words
    assert codes([0.5, 0.9, 0.89]) == []


def test_a_run_that_ends_with_its_best_round_is_judged_by_that():
    assert codes([0.5, 0.9, 0.8], keep="best") == []


def test_overfitting_needs_a_training_loss_that_falls():
    worse = {"losses": [0.7, 0.5, 0.6, 0.7]}
    assert codes([0.5, 0.8, 0.8, 0.79], trained=[0, 0.6, 0.4, 0.2], **worse) == ["overfitting"]
    assert codes([0.5, 0.8, 0.8, 0.79], trained=[0, 0.6, 0.6, 0.6], **worse) == []
    # Its answers got better, though it is too sure of them.
    assert codes([0.5, 0.8, 0.8, 0.83], trained=[0, 0.6, 0.4, 0.2], **worse) == []


def test_what_sharing_costs_is_said_where_it_is_known():
    (found,) = verdicts(run_of([0.5, 0.8], [("single", 0.9)]))
    assert found.code == "sharing"
    assert "accuracy 0.800 against 0.900 of the task federated by itself" in found.words
    assert codes([0.5, 0.8], [("alone", 0.7)]) == []


def test_scores_that_are_not_finite_are_the_first_thing_to_say():
    events = [
        StartEvent(tasks={"sst2": SST2}),
        EvaluationEvent(round=0, task="sst2", metrics={"accuracy": 0.5}, examples=400),
        EvaluationEvent(
            round=1, task="sst2", metrics={"accuracy": None}, undefined={"accuracy": "9 of 9 are not finite"}
        ),
        RoundEvent(round=1),
    ]
    (found,) = verdicts(events)
    assert found.words == (
        "sst2: has no accuracy after round 1, as 9 of 9 are not finite; try a tenth of training.learning_rate"
    )


def test_a_regression_is_also_judged_by_how_far_off_it_is():
    def scored(number, mse):
        return EvaluationEvent(round=number, task="stsb", metrics={"pearson": 0.8, "mse": mse}, examples=400)

    events = [
        StartEvent(tasks={"stsb": STSB}),
        BaselineEvent(task="stsb", name="constant", metrics={"pearson": None, "mse": 2.0}, examples=400),
        BaselineEvent(task="stsb", name="tfidf", metrics={"pearson": 0.8, "mse": 0.5}, examples=400),
        *(part for number, mse in enumerate((0.9, 1.5)) for part in (scored(number, mse), RoundEvent(round=number))),
    ]
    lost, before = verdicts(events)
    assert lost.words.startswith(
        "stsb: mse 1.500 is worse than TF-IDF with a linear model (0.500), standard error 0.112"
    )
    assert before.words.startswith("stsb: mse 1.500 is worse than before training (0.900)")


def test_examples_that_several_clients_scored_count_once():
    events = run_of([0.5, 0.8], [("tfidf", 0.84)])
    many = [DataEvent(task="sst2", validation=40) if isinstance(event, DataEvent) else event for event in events]
    assert [one.code for one in verdicts(many)] == ["ahead"]


def test_a_run_without_rounds_says_nothing():
    assert verdicts([]) == []
    assert codes([0.5]) == []


def test_as_good_as_a_constant_is_no_better_and_not_worse():
    (found,) = verdicts(run_of([0.5, 0.5], [("constant", 0.5)]))
    assert "is no better than the majority class (0.500)" in found.words


def test_a_loss_of_nearly_nothing_that_rises_is_no_overfitting():
    rises = {"trained": [0, 0.6, 0.4, 0.2]}
    assert "overfitting" not in codes([0.5, 0.9, 0.9, 0.9], losses=[0.7, 0.0001, 0.0002, 0.0004], **rises)
    # Every answer is right in all of these rounds; what rose is a five-hundredth of the loss before training.
    assert "overfitting" not in codes([0.5, 1.0, 1.0, 1.0], losses=[0.69, 0.0004, 0.001, 0.0016], **rises)
    assert "overfitting" in codes([0.5, 0.9, 0.9, 0.9], losses=[0.7, 0.1, 0.2, 0.4], **rises)
