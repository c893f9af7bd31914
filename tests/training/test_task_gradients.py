from dataclasses import replace

import pytest
import torch

from fedmtl.sharing.keys import layer_of
from fedmtl.sharing.plan import SharingPlan
from fedmtl.training.local import train
from fedmtl.training.objective import Objective

from .small_client import CPU, PLAN, SINGLE, bind, make_settings, make_shard, make_task, small_model

OTHER = make_task("other", pool="pooler")
LAYERS = ("encoder.layer.1", "pooler")
# So small a rate that all steps see the same values.
STILL = {"optimizer": "sgd", "learning_rate": 1e-12, "max_grad_norm": 0.0, "batch_size": 4, "weight_decay": 0.0}


def measured(tmp_path, tasks, plan=PLAN, layers=LAYERS, **training):
    model = small_model(*tasks)
    shards = {task.name: make_shard(task, tmp_path, range(4 * number, 12)) for number, task in enumerate(tasks)}
    settings = replace(make_settings(*tasks, **{**STILL, **training}), measured_layers=layers)
    trained = train(bind(model, plan=plan), shards, settings, round_number=1, seed=5, device=CPU)
    return model, shards, trained.inner_products


def test_they_are_the_products_of_the_tasks_summed_gradients(tmp_path):
    model, shards, told = measured(tmp_path, (SINGLE, OTHER))
    # twelve and eight examples in batches of four: three and two mean losses, whichever examples meet in one
    bound = bind(model)
    objective = Objective(bound, shards, CPU)
    sums = {}
    for task, shard in shards.items():
        for key in bound.parameters:
            bound.parameters[key].grad = None
        for start in range(0, len(shard), 4):
            objective.loss(task, shard.indices[start : start + 4]).backward()
        for layer in LAYERS:
            own = [value.grad.flatten() for key, value in bound.parameters.items() if layer_of(key.name) == layer]
            sums[task, layer] = torch.cat(own)
    for layer in LAYERS:
        for i, a in enumerate(shards):
            for j, b in enumerate(shards):
                assert told[layer][i][j] == pytest.approx(float(sums[a, layer] @ sums[b, layer]), rel=1e-6)


def test_momentum_does_not_mix_the_tasks(tmp_path):
    plain = measured(tmp_path, (SINGLE, OTHER))[2]
    mixed = measured(tmp_path, (SINGLE, OTHER), momentum=0.9)[2]
    assert mixed["pooler"][0] == pytest.approx(plain["pooler"][0], rel=1e-6)


def test_a_task_that_does_not_reach_a_layer_has_nothing_in_it(tmp_path):
    by_mean = make_task("other", pool="mean")
    told = measured(tmp_path, (SINGLE, by_mean))[2]
    assert told["pooler"][0][0] > 0
    assert told["pooler"][0][1] == told["pooler"][1][1] == 0
    assert told["encoder.layer.1"][1][1] > 0


def test_nothing_is_told_of_values_that_tasks_do_not_share_or_that_nobody_asked_for(tmp_path):
    split = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "task"), ("*", "all")))
    assert set(measured(tmp_path, (SINGLE, OTHER), split)[2]) == {"pooler"}
    assert measured(tmp_path, (SINGLE, OTHER), layers=())[2] == {}
    assert measured(tmp_path, (SINGLE,))[2] == {}
