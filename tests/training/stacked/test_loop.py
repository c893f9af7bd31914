"""A stack against its clients trained one after another."""

from __future__ import annotations

import pytest
import torch

from fedmtl.model.binding import BoundModel
from fedmtl.model.keys import Key
from fedmtl.model.values import initial_weights
from fedmtl.model.vocabulary import take_rows, used_rows
from fedmtl.training.local import Trained, train
from fedmtl.training.stacked.loop import Stacks, train_stack
from fedmtl.training.stacked.plan import Member

from ..small_client import (
    CPU,
    CROSS,
    DUAL,
    PLAN,
    SINGLE,
    copied,
    furthest,
    make_settings,
    make_shard,
    make_task,
    small_model,
)

THREE = make_task(
    "three", text=("a", "b"), pair="dual", pool="cls", labels=("x", "y", "z"), class_weights=(1.0, 4.0, 0.5)
)
BALANCED = make_task("single", pool="mean", class_weights="balanced")
SCORES = make_task("scores", kind="regression", pool="pooler")
ALONE = (range(12), [0, 1, 4, 7, 9], [2, 3, 5])
CASES = {
    "single, pooler, cross-entropy": ((SINGLE,), {}),
    "one balanced output, cls, linear": ((CROSS,), {"schedule": "linear", "num_rounds": 3}),
    "dual, mean, squared error": ((DUAL,), {"local_epochs": 2}),
    "balanced, mean": ((BALANCED,), {}),
    "dual, three weighted classes": ((THREE,), {"local_epochs": 2}),
    "two tasks, own rates and weights, clipped": (
        (SINGLE, SCORES),
        {"max_grad_norm": 0.05, "weight_decay": 0.3, "rates": {"scores": 3e-3}, "loss_weights": {"single": 0.4}},
    ),
    "heads with a rate of their own": ((SINGLE,), {"head_rate": 20, "weight_decay": 0.3}),
    "unclipped": ((SINGLE,), {"max_grad_norm": 0}),
    "proximal": ((SINGLE,), {"proximal": 0.7, "local_epochs": 2, "epsilon": 1e-2, "learning_rate": 0.01}),
    "sgd with momentum, decayed": (
        (SINGLE,),
        {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "weight_decay": 0.1},
    ),
    "plain sgd": ((SINGLE,), {"optimizer": "sgd", "learning_rate": 0.05}),
    "local steps": ((SINGLE,), {"local_steps": 7}),
}


def make_clients(model, tasks, folder):
    """Three clients of every task, with other examples and other numbers of them."""
    clients = []
    for task in tasks:
        for number, examples in enumerate(ALONE):
            shard = make_shard(task, folder, list(examples))
            rows = used_rows(shard.used_ids(), model.pad_id)
            keys = PLAN.keys(model.canonical(), [task.name], "")[task.name]
            weights = {
                key: value.clone() for key, value in initial_weights(model, PLAN).items() if key in keys.values()
            }
            table = Key("all", model.table)
            weights[table] = take_rows(weights[table], rows)
            clients.append((Member(f"{task.name}{number}", task, shard, 100 + number, keys, rows), weights))
    return clients


def one_by_one(model, clients, settings, round_number=2):
    found = []
    for member, weights in clients:
        bound = BoundModel(model, PLAN, [member.task.name], "", copied(weights), member.rows)
        trained = train(
            bound, {member.task.name: member.shard}, settings, round_number=round_number, seed=member.seed, device=CPU
        )
        found.append((trained, copied(bound.values())))
    return found


def stacked(model, clients, settings, stacks=None, round_number=2):
    stacks = stacks or Stacks(model, CPU, next(model.parameters()).dtype)
    members = [member for member, _ in clients]
    values = [{name: weights[key] for name, key in member.keys.items()} for member, weights in clients]
    return train_stack(stacks, members, values, settings, round_number=round_number)


@pytest.mark.parametrize("case", CASES)
def test_a_stack_equals_its_clients_one_by_one(case, tmp_path):
    tasks, options = CASES[case]
    check_equal(small_model(*tasks), tasks, options, tmp_path)


@pytest.mark.parametrize("task", [SINGLE, CROSS, DUAL], ids=["pooler", "cls", "mean"])
def test_a_stack_of_encoders_with_fewer_heads_does_too(task, tmp_path):
    model = small_model(task, heads=1)
    assert model.layout.attention_width == 16
    check_equal(model, (task,), {}, tmp_path)


def check_equal(model, tasks, options, tmp_path):
    settings = make_settings(*tasks, **options)
    clients = make_clients(model, tasks, tmp_path)
    expected = one_by_one(model, clients, settings)
    found = stacked(model, clients, settings)
    for (member, before), (trained, values), outcome in zip(clients, expected, found, strict=True):
        assert isinstance(outcome.trained, Trained)
        assert outcome.trained.steps == trained.steps
        assert outcome.trained.losses == pytest.approx(trained.losses, rel=1e-7)
        moved = {member.keys[name]: value for name, value in outcome.delta.items()}
        assert furthest({key: values[key] - before[key] for key in moved}, moved) < 1e-10
        assert all(torch.equal(values[key], before[key]) for key in values if key not in moved)
        assert max(float(value.abs().max()) for value in moved.values()) > 1e-4
