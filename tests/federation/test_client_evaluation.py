"""A client's scores are checked as strictly as its updates: it can spoil neither the run nor another task's score."""

from dataclasses import replace

import numpy as np
import pytest

from fedmtl.federation.client_evaluation import client_evaluator
from fedmtl.federation.messages import ClientInfo, Update
from fedmtl.tasks.metrics import sum_predictions

from .fake_engine import FakeEngine, make_server, start

SERVER = make_server()
# Client a has three right of four, b one right of two; c's scores are off by a constant.
CLASSES = {"a": ([0, 0, 1, 1], [0, 0, 1, 0]), "b": ([0, 1], [1, 1])}
SCORES = np.array([0.0, 0.5, 1.0])


def sums_of(client, pairs=False):
    if client == "c":
        return sum_predictions(SERVER.tasks["stsb"], SCORES[:, None] * 0.5, SCORES, 0.1, pairs).to_dict()
    labels, predicted = CLASSES[client]
    return sum_predictions(SERVER.tasks["sst2"], np.eye(2)[predicted], np.array(labels), 1.0, pairs).to_dict()


def honest(job):
    task = job.tasks[0]
    count = 3 if job.client == "c" else len(CLASSES[job.client][0])
    sums = {task: sums_of(job.client, job.settings["share_pairs"])}
    return Update(job.round, job.client, job.tasks, {}, job.rows, {task: count}, {}, sums)


class Scored(FakeEngine):
    def clients(self):
        sizes = {"a": {"sst2": 4}, "b": {"sst2": 2}, "c": {"stsb": 3}}
        return {name: replace(info, num_validation=sizes[name]) for name, info in super().clients().items()}


def evaluate(answer, server=SERVER):
    return client_evaluator(server, Scored(answer))(start())


def test_honest_sums_are_merged():
    evaluation = evaluate(honest)
    # (3 + 1) of 6
    assert evaluation.scores["sst2"].metrics["accuracy"] == pytest.approx(4 / 6)
    assert evaluation.scores["stsb"].metrics["pearson"] == pytest.approx(1.0)
    assert evaluation.clients["sst2"] == {"a": 0.75, "b": 0.5}
    assert evaluation.failures == ()


def with_sums(**changes):
    """Client c's answer with other sums of its task."""
    return lambda job: replace(honest(job), sums={"stsb": {**sums_of("c"), **changes}})


def another_task(job):
    # What a site of similarity alone once did to sentiment's score.
    perfect = {"confusion": [[10**8, 0], [0, 10**8]], "loss": 0.0, "broken": 0}
    return replace(honest(job), sums={**honest(job).sums, "sst2": perfect})


BAD = {
    "pairs that are no list": with_sums(pairs=0),
    "a count of 400 digits": with_sums(broken=10**400),
    "a negative sum of squares": with_sums(squared_error=-1),
    "a moment that is text": with_sums(mean_score="1"),
    "a moment that is true": with_sums(mean_score=True),
    "a moment that is not finite": with_sums(spread_score=float("nan")),
    "a product larger than both spreads allow": with_sums(spread_both=1e9),
    "an absolute error larger than the squares allow": with_sums(absolute_error=1e9),
    "labels outside their range": with_sums(mean_score=50.0, range_score=[0.0, 100.0], spread_score=7500.0),
    "pairs that nobody wanted": with_sums(pairs=[[0.0, 0.25, 0.5], [0.0, 0.5, 1.0]]),
    "another task": another_task,
    "another round": lambda job: replace(honest(job), round=job.round + 1),
    "more examples than it has": lambda job: replace(
        honest(job),
        num_examples={"stsb": 4},
        sums={"stsb": {**sums_of("c"), "count": 4, "residuals": [0] * 19 + [4]}},
    ),
    "another number of examples": lambda job: replace(honest(job), num_examples={"stsb": 2}),
    "no sums": lambda job: replace(honest(job), sums={}),
    "sums that are a list": lambda job: replace(honest(job), sums={"stsb": []}),
    "a loss beside the sums": lambda job: replace(honest(job), losses={"stsb": 0.1}),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_answer_costs_its_own_client_and_nothing_else(bad):
    evaluation = evaluate(lambda job: bad(job) if job.client == "c" else honest(job))
    assert [failure.client for failure in evaluation.failures] == ["c"]
    assert evaluation.failures[0].reason
    assert evaluation.scores["sst2"].metrics["accuracy"] == pytest.approx(4 / 6)
    assert "stsb" not in evaluation.scores


def test_a_second_answer_does_not_count():
    class Twice(Scored):
        def run(self, jobs, deadline):
            for answer in super().run(jobs, deadline):
                yield answer
                yield answer

    evaluation = client_evaluator(SERVER, Twice(honest))(start())
    assert evaluation.scores["sst2"].examples == 6
    assert {failure.reason for failure in evaluation.failures} == {"answered twice"}


def test_an_answer_of_somebody_who_was_given_no_job_does_not_count():
    evaluation = evaluate(lambda job: replace(honest(job), client="d") if job.client == "a" else honest(job))
    assert [(failure.client, failure.reason) for failure in evaluation.failures] == [("d", "answered without a job")]


def test_pairs_must_be_those_that_were_summed():
    sharing = replace(SERVER, evaluation=SERVER.evaluation.model_copy(update={"share_pairs": True}))
    assert evaluate(honest, sharing).scores["stsb"].metrics["spearman"] == pytest.approx(1.0)
    # All equal, though the ranges say otherwise: their ranks would be divided by nothing.
    constant = with_sums(pairs=[[0.25] * 3, [0.5] * 3])
    evaluation = evaluate(lambda job: constant(job) if job.client == "c" else honest(job), sharing)
    assert [failure.client for failure in evaluation.failures] == ["c"]


def test_without_declared_sizes_sums_are_not_bounded_by_them():
    class Undeclared(FakeEngine):
        def clients(self):
            return {"a": ClientInfo({"sst2": 1}), "b": ClientInfo({"sst2": 3}), "c": ClientInfo({"stsb": 1})}

    assert client_evaluator(SERVER, Undeclared(honest))(start()).failures == ()


@pytest.mark.parametrize("change", [{"broken": 1, "confusion": [[1, 0], [0, 0]]}, {"loss": float("nan")}])
def test_one_client_whose_predictions_are_not_finite_does_not_blank_the_score_of_all(change):
    def answer(job):
        if job.client != "b":
            return honest(job)
        return replace(honest(job), sums={"sst2": {**sums_of("b"), **change}})

    evaluation = evaluate(answer)
    assert evaluation.scores["sst2"].metrics["accuracy"] == 0.75
    assert [failure.client for failure in evaluation.failures] == ["b"]


def test_where_no_predictions_are_finite_it_is_the_model_and_no_client_fails():
    def answer(job):
        if job.client == "c":
            return honest(job)
        count = len(CLASSES[job.client][0])
        return replace(honest(job), sums={"sst2": {"confusion": [[0, 0], [0, 0]], "loss": 1.0, "broken": count}})

    evaluation = evaluate(answer)
    assert evaluation.failures == ()
    assert evaluation.scores["sst2"].metrics["accuracy"] is None
