import pytest
import torch

from fedmtl.sharing.weights import initial_weights, linear_weights
from fedmtl.training.local import train

from .small_client import CPU, CROSS, DUAL, PLAN, SINGLE, bind, make_settings, make_shard, small_model

ADAMW = {"optimizer": "adamw", "weight_decay": 0.1}
SGD = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}


def masks_of(model, share=0.4):
    generator = torch.Generator().manual_seed(1)
    names = set(linear_weights(model))
    return {
        key: torch.rand(value.shape, generator=generator) < share
        for key, value in initial_weights(model, PLAN).items()
        if key.name in names
    }


def test_linear_weights_are_matrices_of_layers_and_heads():
    names = linear_weights(small_model(SINGLE, DUAL))
    # Six a layer, two layers, the pooler, two heads.
    assert len(names) == 15
    assert not any("embeddings" in name or "LayerNorm" in name for name in names)
    assert names[-2:] == ["heads.single.weight", "heads.dual.weight"]


@pytest.mark.parametrize(
    "options",
    [ADAMW, SGD, {**ADAMW, "proximal": 0.1}, {**ADAMW, "task_schedule": "joint", "gradients": "pcgrad"}],
    ids=["adamw", "sgd", "fedprox", "pcgrad"],
)
def test_pruned_weights_are_zero_after_training_and_others_move(tmp_path, options):
    tasks = (SINGLE, CROSS)
    model = small_model(*tasks, dropout=0.1)
    shards = {task.name: make_shard(task, tmp_path) for task in tasks}
    settings = make_settings(*tasks, local_epochs=2, **options)
    first = train(bind(model), shards, settings, round_number=1, seed=5, device=CPU)
    pruned = masks_of(model)
    # The moments kept of weights that are pruned since would move them.
    bound = bind(model)
    before = {key: value.clone() for key, value in bound.values().items()}
    second = train(bound, shards, settings, round_number=2, seed=6, device=CPU, kept=first.optimizer, pruned=pruned)
    assert second.steps > 0
    for key, mask in pruned.items():
        after = bound.values()[key]
        assert not after[mask].any()
        assert (after[~mask] != before[key][~mask]).all()


def test_gradients_of_pruned_weights_do_not_count_when_gradients_are_clipped(tmp_path):
    # One step of rate 1 is as long as the clipped gradient, all of it in weights that are not pruned.
    model = small_model(SINGLE)
    shards = {"single": make_shard(SINGLE, tmp_path, range(5))}
    settings = make_settings(SINGLE, optimizer="sgd", learning_rate=1.0, weight_decay=0.0, max_grad_norm=1e-4)
    pruned = masks_of(model, 0.9)
    before = initial_weights(model, PLAN)
    bound = bind(model)
    train(bound, shards, settings, round_number=1, seed=5, device=CPU, pruned=pruned)
    moved = [
        (value - before[key]).masked_fill(pruned.get(key, torch.tensor(False)), 0.0)
        for key, value in bound.values().items()
    ]
    assert float(torch.cat([step.reshape(-1) for step in moved]).norm()) == pytest.approx(1e-4, rel=1e-2)
