import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.training import local
from fedmtl.training.local import TrainingFailed, num_steps, planned_steps, predict, train
from fedmtl.training.local_method import LocalSettings

from .small_client import (
    CPU,
    CROSS,
    DUAL,
    FIRST,
    PLAN,
    SCORES,
    SINGLE,
    bind,
    copied,
    furthest,
    make_methods,
    make_settings,
    make_shard,
    make_task,
    small_model,
)

DROPPING = make_task("single", pool="mean", dropout=0.3)


def rows_of(steps) -> list[list[int]]:
    return [batch.tolist() for _, batch in steps]


def test_local_steps_cut_an_epoch_short_or_go_on_into_the_next(tmp_path):
    # Seven examples by two are four batches an epoch.
    shards = {"single": make_shard(SINGLE, tmp_path, range(7))}
    steps = {count: list(planned_steps(shards, make_settings(batch_size=2, local_steps=count), 5)) for count in (3, 6)}
    assert [len(taken) for taken in steps.values()] == [3, 6]
    assert rows_of(steps[6])[:3] == rows_of(steps[3])
    first = [row for rows in rows_of(steps[6])[:4] for row in rows]
    assert sorted(first) == list(range(7))


def test_each_epoch_visits_each_example_once_in_an_order_of_its_own(tmp_path):
    shards = {"single": make_shard(SINGLE, tmp_path), "dual": make_shard(DUAL, tmp_path, range(5))}
    settings = make_settings(batch_size=2, local_epochs=3)
    steps = list(planned_steps(shards, settings, 5))
    # Six and three batches an epoch.
    epochs = [steps[start : start + 9] for start in (0, 9, 18)]
    assert len(steps) == 27
    for epoch in epochs:
        seen = Counter((task, row) for task, batch in epoch for row in batch.tolist())
        assert seen == Counter([("single", row) for row in range(12)] + [("dual", row) for row in range(5)])
    assert len({str(rows_of(epoch)) for epoch in epochs}) == 3


def test_a_task_may_have_a_batch_size_of_its_own(tmp_path):
    shards = {"single": make_shard(SINGLE, tmp_path), "dual": make_shard(DUAL, tmp_path, range(5))}
    settings = make_settings(SINGLE, DUAL, batch_size=4, batch_sizes={"dual": 2})
    sizes = Counter((task, len(batch)) for task, batch in planned_steps(shards, settings, 5))
    # Twelve by four; five by two are two whole batches and a rest.
    assert sizes == Counter({("single", 4): 3, ("dual", 2): 2, ("dual", 1): 1})
    assert num_steps(shards, settings) == 6
    assert settings.largest_batch == 4
    assert LocalSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_few_examples_make_more_and_smaller_batches_down_to_eight(tmp_path):
    settings = make_settings(SINGLE, batch_size=12, min_steps=2)
    # Twelve examples by two steps would be batches of six: eight and four.
    shards = {"single": make_shard(SINGLE, tmp_path)}
    assert [len(batch) for _, batch in planned_steps(shards, settings, 5)] == [8, 4]
    assert num_steps(shards, settings) == 2
    assert [settings.batch_size_of("single", number) for number in (3, 20, 24, 1000)] == [8, 10, 12, 12]
    # Memory is reserved for the largest, whoever has how many examples.
    assert settings.largest_batch == 12
    assert LocalSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_a_batch_that_is_smaller_than_eight_stays(tmp_path):
    settings = make_settings(SINGLE, batch_size=5, min_steps=50)
    assert settings.batch_size_of("single", 12) == 5


def test_the_plan_depends_on_the_seed_alone(tmp_path):
    shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, DUAL)}
    settings = make_settings(batch_size=2)
    steps = rows_of(planned_steps(shards, settings, 5))
    np.random.seed(1)
    assert rows_of(planned_steps(dict(reversed(shards.items())), settings, 5)) == steps
    assert rows_of(planned_steps(shards, settings, 6)) != steps


@pytest.mark.parametrize("options", [{"local_steps": 3}, {"local_epochs": 2}])
def test_a_client_without_examples_takes_no_step(options, tmp_path):
    shards = {"single": make_shard(SINGLE, tmp_path, [])}
    bound = bind(small_model(SINGLE))
    before = copied(bound.weights())
    trained = train(bound, shards, make_settings(SINGLE, **options), round_number=1, seed=0, device=CPU)
    assert (trained.steps, trained.losses, furthest(bound.weights(), before)) == (0, {}, 0.0)


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before(tmp_path):
    shards = {"single": make_shard(DROPPING, tmp_path)}
    values = []
    for before, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(before)
        bound = bind(small_model(DROPPING, dropout=0.1, dtype=torch.float32))
        torch.manual_seed(before)
        np.random.seed(before)
        train(bound, shards, make_settings(DROPPING), round_number=1, seed=seed, device=CPU)
        values.append(bound.weights())
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])
    assert furthest(values[0], values[2]) > 1e-4


def test_dropout_is_on_while_training_and_off_after(tmp_path):
    model = small_model(DROPPING, dropout=0.1)
    shards = {"single": make_shard(DROPPING, tmp_path)}
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    train(bind(model), shards, make_settings(DROPPING), round_number=1, seed=0, device=CPU)
    assert modes == [True] * 3
    assert not any(module.training for module in model.modules())


def test_the_reported_loss_is_the_mean_over_examples(tmp_path):
    # At rate zero nothing moves, so the mean over uneven batches is the loss of the whole shard.
    settings = make_settings(SINGLE, DUAL, num_rounds=10**9, warmup_rounds=1e9, loss_weights={"dual": 7.0})
    shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, DUAL)}
    bound = bind(small_model(SINGLE, DUAL))
    trained = train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    for task in ("single", "dual"):
        _, total = predict(bound, task, shards[task], 12, CPU)
        assert trained.losses[task] == pytest.approx(total / 12, abs=1e-6)
    assert trained.steps == 6


@pytest.mark.parametrize("task", [SINGLE, CROSS, DUAL])
def test_a_batch_of_one_example_trains(task, tmp_path):
    shards = {task.name: make_shard(task, tmp_path, [3])}
    bound = bind(small_model(task))
    before = predict(bound, task.name, shards[task.name], 1, CPU)[1]
    settings = make_settings(task, batch_size=1, local_steps=5)
    train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    assert predict(bound, task.name, shards[task.name], 1, CPU)[1] < before


def test_a_loss_weight_scales_the_step_of_its_task_only(tmp_path):
    # One unclipped, undecayed SGD step each: the head's step is the gradient times rate times weight.
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    options = {"optimizer": "sgd", "batch_size": 12, "max_grad_norm": 0, "weight_decay": 0, "local_steps": 1}
    steps = []
    for weights in ({}, {"cross": 2.0}, {"single": 2.0}):
        bound = bind(small_model(CROSS, SINGLE))
        before = copied(bound.weights())
        settings = make_settings(CROSS, SINGLE, loss_weights=weights, **options)
        train(bound, shards, settings, round_number=1, seed=0, device=CPU)
        steps.append({key: bound.weights()[key] - before[key] for key in before})
    key = Key("task:cross", "heads.cross.weight")
    assert torch.allclose(steps[1][key], 2 * steps[0][key], rtol=1e-9, atol=0)
    assert torch.equal(steps[2][key], steps[0][key])
    assert steps[0][key].abs().max() > 0


def broken_scores(*rows: int) -> np.ndarray:
    scores = SCORES.copy()
    scores[list(rows)] = math.nan
    return scores


def test_a_loss_that_is_not_a_number_is_one_line_with_step_task_and_remedy(tmp_path):
    shards = {"dual": make_shard(DUAL, tmp_path, labels=broken_scores(4)), "single": make_shard(SINGLE, tmp_path)}
    settings = make_settings(DUAL, SINGLE, batch_size=1, rates={"dual": 0.25})
    step = [(task, batch.tolist()) for task, batch in planned_steps(shards, settings, 0, 1)].index(("dual", [4]))
    with pytest.raises(TrainingFailed) as failed:
        train(bind(small_model(DUAL, SINGLE)), shards, settings, round_number=1, seed=0, device=CPU)
    assert str(failed.value) == (
        f"the loss of dual became nan at step {step + 1}; "
        "lower training.learning_rate (0.25 for dual) or training.max_grad_norm (1)"
    )


def test_the_remedy_names_clipping_where_it_is_off(tmp_path):
    shards = {"dual": make_shard(DUAL, tmp_path, labels=broken_scores(*range(12)))}
    with pytest.raises(TrainingFailed, match=r"at step 1; .* or set training\.max_grad_norm$"):
        train(bind(small_model(DUAL)), shards, make_settings(DUAL, max_grad_norm=0), round_number=1, seed=0, device=CPU)


@pytest.mark.parametrize(("check_steps", "taken"), [(4, 4), (5, 5), (64, 12)])
def test_a_broken_loss_is_found_within_the_check_interval(check_steps, taken, tmp_path, monkeypatch):
    # All twelve are broken from the first step on; with 64 the round is over before the first check.
    monkeypatch.setattr(local, "CHECK_STEPS", check_steps)
    model = small_model(DUAL)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    shards = {"dual": make_shard(DUAL, tmp_path, labels=broken_scores(*range(12)))}
    with pytest.raises(TrainingFailed, match="step 1;"):
        train(bind(model), shards, make_settings(DUAL, batch_size=1), round_number=1, seed=0, device=CPU)
    assert len(calls) == taken


def test_only_the_last_loss_of_a_round_broken_is_found(tmp_path, monkeypatch):
    # Eleven steps end in a check of their own, though every fourth was checked before.
    monkeypatch.setattr(local, "CHECK_STEPS", 4)
    settings = make_settings(DUAL, batch_size=1, local_steps=11)
    whole = {"dual": make_shard(DUAL, tmp_path)}
    last = list(planned_steps(whole, settings, 0, 1))[-1][1]
    shards = {"dual": make_shard(DUAL, tmp_path, labels=broken_scores(*last))}
    with pytest.raises(TrainingFailed, match="step 11;"):
        train(bind(small_model(DUAL)), shards, settings, round_number=1, seed=0, device=CPU)


def test_a_client_that_failed_in_mid_round_leaves_no_dropout_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "CHECK_STEPS", 1)
    dual = make_task("dual", kind="regression", labels=(), text=("a", "b"), pair="dual", pool="mean", dropout=0.5)
    model = small_model(dual, dropout=0.5)
    start = initial_weights(model, PLAN)
    good, bad = make_shard(dual, tmp_path), make_shard(dual, tmp_path, labels=broken_scores(0))
    before, _ = predict(bind(model, start), "dual", good, 4, CPU)
    with pytest.raises(TrainingFailed):
        train(bind(model, start), {"dual": bad}, make_settings(dual), round_number=1, seed=0, device=CPU)
    after, _ = predict(bind(model, start), "dual", good, 4, CPU)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_task_whose_values_are_all_fixed_is_scored_and_the_others_train(optimizer, tmp_path):
    plan = SharingPlan((("heads.single.*", "fixed"), ("heads.*", "task"), ("*", "fixed")))
    shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, DUAL)}
    bound = bind(small_model(SINGLE, DUAL), plan=plan)
    before = copied(bound.weights())
    settings = make_settings(SINGLE, DUAL, optimizer=optimizer)
    trained = train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    moved = {key.name for key in before if not torch.equal(before[key], bound.weights()[key])}
    assert moved == {"heads.dual.weight", "heads.dual.bias"}
    assert set(trained.losses) == {"single", "dual"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_client_with_nothing_to_move_reports_its_loss(optimizer, tmp_path):
    bound = bind(small_model(SINGLE), plan=SharingPlan((("*", "fixed"),)))
    before = copied(bound.weights())
    settings = make_settings(SINGLE, optimizer=optimizer, proximal=0.1)
    shards = {"single": make_shard(SINGLE, tmp_path)}
    methods = make_methods(settings)
    trained = train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=methods)
    assert (trained.steps, furthest(bound.weights(), before)) == (3, 0.0)
    assert trained.losses["single"] == pytest.approx(math.log(2), abs=0.2)


def test_training_lowers_the_loss(tmp_path):
    shards = {"single": make_shard(SINGLE, tmp_path)}
    bound = bind(small_model(SINGLE, dtype=torch.float32))
    settings = make_settings(SINGLE, local_epochs=20, learning_rate=3e-3)
    train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    # Twelve different texts can be learnt by heart; guessing the larger class costs 0.64 each.
    assert predict(bound, "single", shards["single"], 12, CPU)[1] / len(FIRST) < 0.2
