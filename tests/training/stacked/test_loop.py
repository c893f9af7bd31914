"""A stack against its clients trained one after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytest
import torch

from fedmtl.model.multitask import BoundModel
from fedmtl.sharing.plan import Extra, Key, take_rows, used_rows
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.task import HiddenLayer, Windows
from fedmtl.training.local import Trained, train
from fedmtl.training.stacked.loop import Stacks, train_stack
from fedmtl.training.stacked.plan import Member, named_state
from fedmtl.training.stacked.shape import reached

from ..small_client import (
    CPU,
    CROSS,
    DUAL,
    PLAN,
    SINGLE,
    TAGGED,
    copied,
    furthest,
    make_methods,
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
TAGGED_TOO = make_task("other", kind="tagging", labels=("Z",), metric="f1")
DEEP = make_task("single", pool="cls", head=HiddenLayer(6, "relu", 0.0))
DEEP_DUAL = make_task("dual", text=("a", "b"), pair="dual", pool="mean", head=HiddenLayer(None, "gelu", 0.0))
OVERLAPPING = Windows(stride=2)
MEANS = make_task("single", pool="mean", windows=OVERLAPPING)
MOST = make_task("cross", text=("a", "b"), pool="cls", outputs=1, windows=Windows(most=2, pool="max"))
LEARNT = make_task(
    "single", pool="pooler", head=HiddenLayer(6, "relu", 0.0), windows=Windows(stride=2, pool="attention")
)
LEARNT_DUAL = replace(DUAL, windows=Windows(stride=3, pool="attention"))
TAGGED_LONG = make_task("tagged", kind="tagging", labels=("X", "Y"), metric="f1", windows=OVERLAPPING)
COUNTED = {"logit_adjustment": Extra({"label_counts": {"single": [40, 3], "cross": [3, 40]}})}
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
    "two tasks, own batch sizes": ((SINGLE, SCORES), {"batch_sizes": {"single": 7, "scores": 2}, "local_epochs": 2}),
    "labels that differ, two outputs": ((SINGLE,), {"logit_adjustment": 1}),
    "labels that differ, one output": ((CROSS,), {"logit_adjustment": 0.5}),
    "heads with a rate of their own": ((SINGLE,), {"head_rate": 20, "weight_decay": 0.3}),
    "unclipped": ((SINGLE,), {"max_grad_norm": 0}),
    "proximal": ((SINGLE,), {"proximal": 0.7, "local_epochs": 2, "epsilon": 1e-2, "learning_rate": 0.01}),
    "sgd with momentum, decayed": (
        (SINGLE,),
        {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "weight_decay": 0.1},
    ),
    "plain sgd": ((SINGLE,), {"optimizer": "sgd", "learning_rate": 0.05}),
    "local steps": ((SINGLE,), {"local_steps": 7}),
    "words": ((TAGGED,), {"local_epochs": 2}),
    "two tasks on words": ((TAGGED, TAGGED_TOO), {"head_rate": 20, "loss_weights": {"tagged": 0.4}}),
    "words of a batch with more": (
        (TAGGED,),
        {"optimizer": "sgd", "learning_rate": 0.05, "batch_sizes": {"tagged": 2}},
    ),
    "a hidden layer": ((DEEP,), {"head_rate": 20, "weight_decay": 0.3}),
    "a hidden layer, plain sgd": ((DEEP,), {"optimizer": "sgd", "learning_rate": 0.05}),
    "a hidden layer on two texts": ((DEEP_DUAL,), {"local_epochs": 2}),
    "windows, mean": ((MEANS,), {"local_epochs": 2}),
    "windows of the longer text, max": ((MOST,), {}),
    "windows, attention": ((LEARNT,), {"head_rate": 20, "weight_decay": 0.3}),
    "windows of two texts, attention": ((LEARNT_DUAL,), {"local_epochs": 2, "batch_sizes": {"dual": 3}}),
    "windows of words": ((TAGGED_LONG,), {"local_epochs": 2}),
    "two tasks with windows": (
        (MEANS, replace(LEARNT, name="other", pool="mean", head=None)),
        {"batch_sizes": {"single": 7, "other": 2}, "local_epochs": 2},
    ),
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
            clients.append(
                (
                    Member(
                        f"{task.name}{number}", (task,), {task.name: shard}, 100 + number, keys, rows, received=COUNTED
                    ),
                    weights,
                )
            )
    return clients


def one_by_one(model, clients, settings, round_number=2, kept=()):
    found = []
    for (member, weights), own in zip_longest(clients, kept):
        tasks = [task.name for task in member.tasks]
        bound = BoundModel(model, PLAN, tasks, "", copied(weights), member.rows)
        trained = train(
            bound,
            member.shards,
            settings,
            round_number=round_number,
            seed=member.seed,
            device=CPU,
            saved=own,
            methods=make_methods(settings, member.received),
        )
        found.append((trained, copied(bound.weights())))
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
    check_same(clients, one_by_one(model, clients, settings), stacked(model, clients, settings))


def check_same(clients, expected, found):
    for (member, before), (trained, values), outcome in zip(clients, expected, found, strict=True):
        assert isinstance(outcome.trained, Trained)
        assert outcome.trained.steps == trained.steps
        assert outcome.trained.seen == trained.seen
        assert outcome.trained.losses == pytest.approx(trained.losses, rel=1e-7)
        moved = {member.keys[name]: value for name, value in outcome.delta.items()}
        assert furthest({key: values[key] - before[key] for key in moved}, moved) < 1e-10
        assert all(torch.equal(values[key], before[key]) for key in values if key not in moved)
        assert max(float(value.abs().max()) for value in moved.values()) > 1e-4
        check_kept(trained.optimizer, outcome.trained.optimizer)


def check_kept(expected, found):
    assert found.keys() == expected.keys()
    # A stack has the weights of classes in fp32: a gradient shows it, a step of AdamW does not.
    assert all(furthest(expected[slot], found[slot]) < 1e-8 for slot in expected)


def test_a_stack_that_is_used_again_takes_the_labels_of_its_round(tmp_path):
    model, settings = small_model(SINGLE), make_settings(SINGLE, logit_adjustment=1)
    stacks = Stacks(model, CPU, torch.float64)
    clients = make_clients(model, (SINGLE,), tmp_path)
    check_same(clients, one_by_one(model, clients, settings), stacked(model, clients, settings, stacks))
    others = {"logit_adjustment": Extra({"label_counts": {"single": [3, 40]}})}
    later = [(replace(member, received=others), weights) for member, weights in clients]
    check_same(later, one_by_one(model, later, settings), stacked(model, later, settings, stacks))
    assert len(stacks.made) == 1


# One encoder, pooled alike: single texts, pairs, and a score.
SEVERAL = (BALANCED, DUAL, replace(THREE, pool="mean"))
ORDERS = {
    "even": {},
    "of two passes, own rates, clipped": {
        "local_epochs": 2, "max_grad_norm": 0.05, "weight_decay": 0.3,
        "rates": {"dual": 3e-3}, "loss_weights": {"single": 0.4}, "head_rate": 20,
    },
    "round robin": {"task_schedule": "round_robin", "local_steps": 7},
    "annealed": {"task_schedule": "annealed", "schedule": "linear", "num_rounds": 3},
    "proximal": {"proximal": 0.7, "epsilon": 1e-2, "learning_rate": 0.01},
    "sgd with momentum": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05},
    "own batch sizes": {"batch_sizes": {"single": 7, "dual": 2}},
    "a task that never has its turn": {"local_steps": 1},
}  # fmt: skip


def make_client(model, tasks, folder):
    """One client that holds several tasks."""
    shards = {task.name: make_shard(task, folder, list(own)) for task, own in zip(tasks, ALONE, strict=True)}
    rows = used_rows((ids for shard in shards.values() for ids in shard.used_ids()), model.pad_id)
    views = PLAN.keys(model.canonical(), list(shards), "")
    weights = copied(initial_weights(model, PLAN))
    weights[Key("all", model.table)] = take_rows(weights[Key("all", model.table)], rows)
    keys = {name: key for view in views.values() for name, key in view.items()}
    return Member("all", tasks, shards, 100, keys, rows), weights


@pytest.mark.parametrize("case", ORDERS)
def test_a_client_with_several_tasks_is_a_stack_of_one(case, tmp_path):
    model = small_model(*SEVERAL)
    check_rounds(model, [make_client(model, SEVERAL, tmp_path)], make_settings(*SEVERAL, **ORDERS[case]))


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9}, {"optimizer": "sgd", "learning_rate": 0.05}],
)
def test_what_optimizers_keep_goes_on_in_the_next_round(options, tmp_path):
    model = small_model(SINGLE, SCORES)
    check_rounds(model, make_clients(model, (SINGLE, SCORES), tmp_path), make_settings(SINGLE, SCORES, **options))


def check_rounds(model, clients, settings):
    """Two rounds of the same stack; the second starts where the first ended, with what its optimizers kept."""
    stacks = Stacks(model, CPU, torch.float64)
    first = one_by_one(model, clients, settings, 1)
    check_same(clients, first, stacked(model, clients, settings, stacks, 1))
    later, kept = [], []
    for (member, _), (trained, values) in zip(clients, first, strict=True):
        reached_names = [name for task in member.tasks for name in reached(model, task.name, member.keys)]
        own = named_state(trained.optimizer, member.keys, reached_names)
        assert own is not None
        later.append((replace(member, optimizer=own), values))
        kept.append(trained.optimizer)
    check_same(later, one_by_one(model, later, settings, 2, kept), stacked(model, later, settings, stacks, 2))
    assert len(stacks.made) == 1


def test_values_that_made_different_numbers_of_steps_do_not_fit_a_stack(tmp_path):
    model = small_model(SINGLE)
    member, _ = make_clients(model, (SINGLE,), tmp_path)[0]
    names = reached(model, "single", member.keys)
    steps = {member.keys[name]: torch.tensor(3.0) for name in names}
    assert named_state({"step": steps}, member.keys, names).head_ages == {"single": 3}
    # A head may be younger than the encoder, a layer may not.
    head, layer = (next(name for name in names if name.startswith(part)) for part in ("heads.", "encoder."))
    assert named_state({"step": {**steps, member.keys[head]: torch.tensor(1.0)}}, member.keys, names).age == 3
    assert named_state({"step": {**steps, member.keys[layer]: torch.tensor(1.0)}}, member.keys, names) is None
