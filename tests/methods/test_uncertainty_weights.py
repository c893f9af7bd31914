"""Loss weights that are learnt with the heads."""

import math
from typing import Any

import pytest
import torch

from fedmtl.sharing.plan import Key, SharingPlan, Weights
from fedmtl.training.local import predict, train
from training.small_client import (
    CPU,
    DUAL,
    PLAN,
    SINGLE,
    bind,
    copied,
    make_methods,
    make_settings,
    make_shard,
    small_model,
    start_methods,
)

PLAIN = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 12, "max_grad_norm": 0, "weight_decay": 0}


def trained(tmp_path, *tasks, plan: SharingPlan = PLAN, **options: Any) -> Weights:
    """The values after a round."""
    bound = bind(small_model(*tasks, log_variances=True), plan=plan)
    shards = {task.name: make_shard(task, tmp_path) for task in tasks}
    settings = make_settings(*tasks, loss_weighting="uncertainty", **options)
    train(bound, shards, settings, round_number=1, seed=0, device=CPU, methods=make_methods(settings))
    return copied(bound.weights())


def log_variance(weights: Weights, task: str) -> float:
    return float(weights[Key(f"task:{task}", f"heads.{task}.log_variance")])


@pytest.mark.parametrize("schedule", ["joint", "round_robin"])
def test_a_variance_moves_by_its_gradient(schedule, tmp_path):
    # d/ds of exp(-s) L + s/2 is 1/2 - L at s = 0; of a regression, exp(-s) L/2 + s/2, it is 1/2 - L/2.
    heads_only = SharingPlan((("heads.*.log_variance", "task"), ("heads.single.*", "task"), ("*", "fixed")))
    bound = bind(small_model(SINGLE, DUAL))
    losses = {
        task.name: predict(bound, task.name, make_shard(task, tmp_path), 12, CPU)[1] / 12 for task in (SINGLE, DUAL)
    }
    options = {**PLAIN, "task_schedule": schedule, "local_steps": 1 if schedule == "joint" else 2}
    after = trained(tmp_path, SINGLE, DUAL, **options)
    assert log_variance(after, "single") == pytest.approx(-0.1 * (0.5 - losses["single"]), abs=1e-9)
    if schedule == "joint":  # else the encoder has moved before its step
        assert log_variance(after, "dual") == pytest.approx(-0.1 * (0.5 - losses["dual"] / 2), abs=1e-9)
    alone = trained(tmp_path, SINGLE, DUAL, plan=heads_only, **options)
    assert log_variance(alone, "single") == pytest.approx(-0.1 * (0.5 - losses["single"]), abs=1e-9)


def test_a_loss_counts_by_its_variance():
    model = small_model(SINGLE, DUAL, log_variances=True)
    for task in ("single", "dual"):
        with torch.no_grad():
            model.heads[task].log_variance.fill_(math.log(4))
    bound = bind(model)
    methods = start_methods(make_settings(SINGLE, DUAL, loss_weighting="uncertainty"), bound, {})
    loss = torch.tensor(3.0, dtype=torch.float64)
    # 3/4 + log(4)/2 and 3/2/4 + log(4)/2
    for task, wanted in (("single", 0.75), ("dual", 0.375)):
        bound.use(task)
        assert methods.weigh(task, loss).item() == pytest.approx(wanted + math.log(2))
    fixed = make_settings(SINGLE, DUAL, loss_weights={"single": 2.0})
    assert start_methods(fixed, bound, {}).weigh("single", loss) is None


def test_a_variance_is_never_decayed(tmp_path):
    found = [
        log_variance(trained(tmp_path, SINGLE, **{**PLAIN, "weight_decay": decay}), "single") for decay in (0.0, 0.5)
    ]
    assert found[0] == found[1] != 0.0
