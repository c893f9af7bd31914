"""Steps that several tasks make together: their gradients joined."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedmtl.sharing.plan import Key, SharingPlan, Weights
from fedmtl.training.local import Objective, Trained, TrainingFailed, train
from fedmtl.training.optimizer import FlatOptimizer

from .small_client import (
    CLASSES,
    CPU,
    CROSS,
    DUAL,
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
    start_methods,
)

PLAIN = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 12, "max_grad_norm": 0, "weight_decay": 0}
JOINT = {"task_schedule": "joint"}
TASKS = (SINGLE, CROSS, DUAL)


def trained(tmp_path, *tasks, plan: SharingPlan = PLAN, **options: Any) -> tuple[Weights, Weights, Trained]:
    """The values before and after a round, and what it says of itself."""
    bound = bind(small_model(*tasks), plan=plan)
    before = copied(bound.weights())
    shards = {task.name: make_shard(task, tmp_path) for task in tasks}
    settings = make_settings(*tasks, **options)
    told = train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=make_methods(settings))
    return before, copied(bound.weights()), told


def conflicts(told: Trained) -> float | None:
    """The share of pairs that pulled apart, where it is sent."""
    return told.sent["pcgrad"].values["conflicts"] if told.sent else None


def test_a_joint_step_is_one_step_down_the_sum_of_the_weighted_losses(tmp_path):
    weights = {"single": 1.0, "cross": 2.0, "dual": 0.5}
    before, after, told = trained(tmp_path, *TASKS, **PLAIN, **JOINT, loss_weights=weights)
    assert told.steps == 1
    assert told.seen == {"single": 12, "cross": 12, "dual": 12}
    bound = bind(small_model(*TASKS), before)
    shards = {task.name: make_shard(task, tmp_path) for task in TASKS}
    objective = Objective(bound, shards, CPU)
    for task in shards:  # autograd adds up
        (weights[task] * objective.loss(task, np.arange(12))).backward()
    wanted = {key: before[key] - 0.1 * own.grad for key, own in bound.parameters.items() if own.grad is not None}
    assert wanted.keys() == before.keys()
    assert furthest(after, wanted) < 1e-9


@pytest.mark.parametrize("gradients", ["sum", "pcgrad"])
def test_every_step_is_as_the_first_whoever_writes_the_gradients(gradients, tmp_path):
    # Where two rounds of one step follow each other without a memory, they are one round of two; and an encoder whose
    # gradients autograd adds up, as on a GPU, gives what one gives that writes over them.
    options = {**PLAIN, **JOINT, "gradients": gradients}
    shards = {task.name: make_shard(task, tmp_path) for task in TASKS}
    found = []
    for plain, rounds in ((False, (2,)), (True, (2,)), (False, (1, 1))):
        model = small_model(*TASKS)
        model.layout = None if plain else model.layout
        bound = bind(model)
        for steps in rounds:
            settings = make_settings(*TASKS, **options, local_steps=steps)
            methods = make_methods(settings)
            told = train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=methods)
            assert told.steps == steps
        found.append(copied(bound.weights()))
    assert furthest(found[0], found[1]) < 1e-9
    if gradients == "sum":  # else the first step of each round draws the same order of tasks
        assert furthest(found[0], found[2]) < 1e-9


def test_gradients_that_agree_give_the_very_weights_of_a_sum(tmp_path):
    # Twice the same task: the gradients of the encoder are nearly equal.
    twin = make_task("twin", pool="pooler")
    plan = SharingPlan((("heads.*", "fixed"), ("*", "all")))
    found = []
    for gradients in ("sum", "pcgrad"):
        bound = bind(small_model(SINGLE, twin, dtype=torch.float32), plan=plan)
        heads = bound.parameters
        with torch.no_grad():
            heads[Key("fixed", "heads.twin.weight")].copy_(heads[Key("fixed", "heads.single.weight")])
        shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, twin)}
        settings = make_settings(SINGLE, twin, **JOINT, gradients=gradients, batch_size=12, local_steps=4)
        methods = make_methods(settings)
        told = train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=methods)
        found.append((copied(bound.weights()), conflicts(told)))
    assert [share for _, share in found] == [None, 0.0]
    assert all(torch.equal(found[0][0][key], found[1][0][key]) for key in found[0][0])


def test_opposed_tasks_are_all_apart_and_move_less(tmp_path):
    # The same texts with the labels turned round, under equal heads: what one wants the other does not.
    rival = make_task("rival", pool="pooler")
    plan = SharingPlan((("heads.*", "fixed"), ("*", "all")))
    moved = {}
    for gradients in ("sum", "pcgrad"):
        bound = bind(small_model(SINGLE, rival), plan=plan)
        with torch.no_grad():
            for leaf in ("weight", "bias"):
                own = bound.parameters[Key("fixed", f"heads.single.{leaf}")]
                bound.parameters[Key("fixed", f"heads.rival.{leaf}")].copy_(own)
        before = copied(bound.weights())
        shards = {"single": make_shard(SINGLE, tmp_path), "rival": make_shard(rival, tmp_path, labels=1 - CLASSES)}
        settings = make_settings(SINGLE, rival, **PLAIN, **JOINT, gradients=gradients, local_steps=3)
        methods = make_methods(settings)
        told = train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=methods)
        moved[gradients] = furthest(before, bound.weights())
        assert conflicts(told) == (1.0 if gradients == "pcgrad" else None)
    assert moved["sum"] != moved["pcgrad"]


def test_hand_made_gradients_are_projected_in_the_buffer(tmp_path):
    # Over the one shared value: (1, 0) and (-1, 1) become (.5, .5) and (0, 1). What one task has alone stays.
    bound = bind(small_model(SINGLE, DUAL))
    settings = make_settings(SINGLE, DUAL, **PLAIN, **JOINT, gradients="pcgrad")
    methods = start_methods(settings, bound, {})
    optimizer = FlatOptimizer(bound, settings, methods)
    shared = Key("all", "embeddings.LayerNorm.bias")
    heads = {task: Key(f"task:{task}", f"heads.{task}.bias") for task in ("single", "dual")}
    before = copied(bound.weights())
    for task, wanted in (("single", [1.0, 0.0]), ("dual", [-1.0, 1.0])):
        gradient = torch.zeros(32, dtype=torch.float64)
        gradient[:2] = torch.tensor(wanted)
        optimizer.backward(task, bound.parameters[shared] @ gradient - 5 * bound.parameters[heads[task]].sum())
        optimizer.keep(task)
    optimizer.join(["single", "dual"])
    assert methods.finish(["single", "dual"])[0]["pcgrad"].values == {"conflicts": 1.0}
    optimizer.step(["single", "dual"], 0.1)
    step = {key: (before[key] - value) / 0.1 for key, value in bound.weights().items()}
    assert step[shared][:3].tolist() == pytest.approx([0.5, 1.5, 0.0])
    assert [step[heads[task]].tolist() for task in heads] == [[pytest.approx(-5)] * 2, [pytest.approx(-5)]]
    untouched = set(step) - {shared, *heads.values()}
    assert all(float(step[key].abs().max()) == 0 for key in untouched)


def test_tasks_that_share_nothing_are_never_apart(tmp_path):
    every = SharingPlan((("*", "task"),))
    _, one, told = trained(tmp_path, *TASKS, plan=every, **PLAIN, **JOINT, gradients="pcgrad")
    _, other, _ = trained(tmp_path, *TASKS, plan=every, **PLAIN, **JOINT)
    assert conflicts(told) == 0.0
    assert furthest(one, other) == 0.0


def test_a_task_with_nothing_to_move_is_scored_and_the_others_step(tmp_path):
    plan = SharingPlan((("heads.single.*", "fixed"), ("heads.*", "task"), ("*", "fixed")))
    before, after, told = trained(tmp_path, SINGLE, DUAL, plan=plan, **JOINT, gradients="pcgrad")
    moved = {key.name for key in before if not torch.equal(before[key], after[key])}
    assert moved == {"heads.dual.weight", "heads.dual.bias"}
    assert set(told.losses) == {"single", "dual"}
    assert conflicts(told) is None


def test_a_loss_that_breaks_in_a_joint_step_is_named_with_its_task_and_step(tmp_path):
    scores = SCORES.copy()
    scores[:] = math.nan
    shards = {"single": make_shard(SINGLE, tmp_path), "dual": make_shard(DUAL, tmp_path, labels=scores)}
    settings = make_settings(SINGLE, DUAL, **JOINT)
    with pytest.raises(TrainingFailed, match="the loss of dual became nan at step 1;"):
        train(bind(small_model(SINGLE, DUAL)), shards, settings, round_number=1, seed=0, device=CPU)
