import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.training import local
from fedmtl.training.optimizer import FlatOptimizer, rate_factor

from .small_client import CPU, DUAL, SINGLE, bind, make_settings, make_shard, small_model


def factor(rounds_done: float, schedule: str, warmup: float = 2, num_rounds: int = 10, **keys: float) -> float:
    # Put in afterwards: a job may have a warm-up that no config of ours has.
    settings = replace(make_settings(schedule=schedule, num_rounds=num_rounds, **keys), warmup_rounds=warmup)
    return rate_factor(settings, rounds_done)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "step"])
def test_warm_up_rises_from_zero_to_the_full_rate(schedule):
    # Two rounds of warm-up: a quarter of it is half a round.
    values = [factor(done, schedule, step_rounds=1) for done in (0, 0.5, 1, 1.5, 2)]
    assert values == [0, 0.25, 0.5, 0.75, 1]


def test_linear_falls_to_zero_over_the_rounds_after_warm_up():
    # Eight rounds are left after warm-up: round 6 is half of them, 9 seven eighths.
    assert [factor(done, "linear") for done in (2, 6, 9, 10)] == [1, 0.5, 0.125, 0]


def test_cosine_falls_to_zero_over_the_rounds_after_warm_up():
    # Round 4 is a quarter of the eight: (1 + cos 45 degrees) / 2 = (1 + 0.7071) / 2.
    values = [factor(done, "cosine") for done in (2, 4, 6, 10)]
    assert values == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, 0], abs=1e-12)


def test_step_drops_every_few_rounds_counted_from_the_end_of_warm_up():
    values = [factor(done, "step", step_rounds=3, step_factor=0.1) for done in (2, 4.99, 5, 7.99, 8)]
    assert values == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    unwarmed = [factor(done, "step", warmup=0, step_rounds=3, step_factor=0.5) for done in (0, 2.99, 3, 6)]
    assert unwarmed == [1, 1, 0.5, 0.25]


def test_constant_stays():
    assert [factor(done, "constant") for done in (2, 5.5, 10)] == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [10, 12])
def test_warm_up_as_long_as_the_run_only_rises(schedule, warmup):
    values = [factor(done, schedule, warmup) for done in (0, 5, 9.5)]
    assert values == [0, 5 / warmup, 9.5 / warmup]
    assert math.isfinite(factor(10, schedule, warmup))


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.floats(0.1, 5),
    done=st.floats(0, 9.99),
    further=st.floats(0, 0.01),
)
def test_the_rate_never_jumps(schedule, warmup, done, further):
    # The steepest slope is 1 / warm-up before, and pi / 2 over at least five rounds after.
    steepest = max(1 / warmup, math.pi / 2 / 5)
    before, after = (factor(at, schedule, warmup) for at in (done, done + further))
    assert abs(after - before) <= steepest * further + 1e-12


def test_the_rate_goes_on_from_round_to_round_and_each_task_has_its_own(tmp_path, monkeypatch):
    # Three steps per task and round, in turns, over two rounds: step k of 12 has 1 - k / 12 of its task's rate.
    settings = make_settings(DUAL, SINGLE, schedule="linear", num_rounds=2, learning_rate=0.1, rates={"single": 0.4})
    shards = {task.name: make_shard(task, tmp_path) for task in (DUAL, SINGLE)}
    seen: list[float] = []
    monkeypatch.setattr(FlatOptimizer, "step", lambda optimizer, task, rate: seen.append(rate))
    bound = bind(small_model(DUAL, SINGLE))
    for number in (1, 2):
        local.train(bound, shards, settings, round_number=number, seed=0, device=CPU)
    assert seen == pytest.approx([(0.4 if step % 2 else 0.1) * (1 - step / 12) for step in range(12)])
