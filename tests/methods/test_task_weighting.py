import math
from dataclasses import replace

import pytest
import torch

from federation.fake_engine import ENCODER, FakeEngine, make_server, scores, start, trained
from fedmtl.config import TaskWeightingConfig
from fedmtl.federation.messages import Progress
from fedmtl.federation.server import rounds
from fedmtl.methods.task_weighting import TaskWeighting, progress_factors
from fedmtl.runs.event_lines import to_json

PROGRESS = TaskWeightingConfig(kind="progress", temperature=2.0, floor=0.05)


def scored(*values: float | None) -> Progress:
    return Progress(tuple(enumerate(values)))


def test_the_weights_are_those_of_dynamic_weight_averaging():
    progress = {"sst2": scored(0.1, 0.6, 0.8), "stsb": scored(None, 0.6, 0.6)}
    factors = progress_factors(PROGRESS, progress)
    # errors .4 -> .2 and .4 -> .4: ratios .5 and 1, over a temperature of 2 exp(.25) = 1.2840 and exp(.5) = 1.6487;
    # 2 * 1.2840 / 2.9327 = .8757 and 2 * 1.6487 / 2.9327 = 1.1243
    assert factors == pytest.approx({"sst2": 0.8757, "stsb": 1.1243}, abs=1e-4)
    given = TaskWeighting(PROGRESS, {"sst2": 2.0, "stsb": 1.0}).before_round(
        replace(start(), progress=progress), {}, {}
    )
    assert given.task_factors == factors
    [event] = map(to_json, given.events)
    assert (event["event"], event["round"]) == ("task_weights", 1)
    assert event["weights"] == pytest.approx({"sst2": 1.7513, "stsb": 1.1243}, abs=1e-4)


def test_a_task_scored_less_than_twice_counts_one_and_the_others_share_their_own_mean():
    told = {"new": scored(None, 0.5), "a": scored(0.6, 0.8), "b": scored(0.6, 0.6)}
    factors = progress_factors(PROGRESS, told)
    assert factors["new"] == 1.0
    assert factors["a"] + factors["b"] == pytest.approx(2.0)
    assert progress_factors(PROGRESS, {"new": scored()}) == {"new": 1.0}


def test_an_undefined_score_is_left_out():
    told = {"a": scored(0.6, None, 0.8), "b": scored(0.6, 0.6)}
    assert progress_factors(PROGRESS, told) == progress_factors(PROGRESS, {**told, "a": scored(0.6, 0.8)})


@pytest.mark.parametrize("path", [(1.0, 1.0), (0.97, 1.0), (1.0, 0.97)])
def test_a_task_without_error_does_not_swing(path):
    # all errors are under the floor of .05, so the ratio is 1 as that of a task that stands still
    assert progress_factors(PROGRESS, {"a": scored(*path), "b": scored(0.5, 0.5)}) == {"a": 1.0, "b": 1.0}


def test_the_largest_weight_is_bounded():
    # .05 -> 1.5 is a ratio of 30, which counts as 2: exp(1) / exp(0 .. .5)
    factors = progress_factors(PROGRESS, {"a": scored(1.0, -0.5), "b": scored(0.0, 0.99)})
    assert factors["a"] / factors["b"] <= math.exp(1.0)


def weights_of(turn) -> dict[str, float]:
    """The task weights that a round tells of."""
    [weights] = [event.weights for event in turn.events if event.kind == "task_weights"]
    return weights


def followed(weight_in: str) -> tuple[FakeEngine, list]:
    """Three rounds in which sst2 gets better and stsb does not; only client c, of stsb, moves anything."""
    sst2 = (0.2, 0.6, 0.8, 0.8)
    engine = FakeEngine(lambda job: trained(job, 3.0 if job.client == "c" else 0.0))
    server = make_server(task_weighting={"kind": "progress"})
    local = replace(server.settings, loss_weights={"sst2": 1.0, "stsb": 1.0})
    server = replace(server, weight_in=weight_in, settings=local)
    turns = list(rounds(start(), server, engine, lambda state: scores(sst2=sst2[state.round], stsb=0.6)))
    return engine, turns


def test_in_averaging_the_encoder_follows_the_task_that_stands_still():
    _, turns = followed("averaging")
    # round 1 has one score each: stsb's step of 3 at 1 example of 5 is .6
    assert turns[1].state.weights[ENCODER].item() == pytest.approx(0.6)
    # after it sst2 went from an error of .8 to .4: the factors of the worked example, 4 examples against 1
    first, second = 0.8757, 1.1243
    step = 3.0 * second / (4 * first + second)
    assert turns[2].state.weights[ENCODER].item() == pytest.approx(0.6 + step, abs=1e-4)
    assert weights_of(turns[2]) == pytest.approx({"sst2": first, "stsb": second}, abs=1e-4)
    assert weights_of(turns[1]) == {"sst2": 1.0, "stsb": 1.0}


def test_in_the_loss_the_jobs_carry_the_weights_and_the_mean_does_not():
    engine, turns = followed("loss")
    told = [job.settings["loss_weights"] for job in engine.jobs if job.client == "c"]
    assert told[0] == {"sst2": 1.0, "stsb": 1.0}
    assert told[1] == pytest.approx({"sst2": 0.8757, "stsb": 1.1243}, abs=1e-4)
    assert turns[2].state.weights[ENCODER].item() == pytest.approx(1.2)
    assert weights_of(turns[2]) == told[1]


def test_fixed_weights_are_told_nowhere():
    turns = list(rounds(start(), make_server(), FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))
    assert all(turn.events == () for turn in turns)
    assert torch.equal(turns[-1].state.weights[ENCODER], torch.tensor([3.0]))
