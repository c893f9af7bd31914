"""A teacher's outputs in a client's loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.methods.distillation import options_of
from fedmtl.training.local import Objective
from training.small_client import CPU, CROSS, bind, make_settings, make_shard, small_model, start_methods


def taught(bound, shard, weight, tasks=("cross",)) -> Objective:
    """The loss of a client whose teacher's outputs have this weight in it."""
    shards = {"cross": shard}
    settings = replace(make_settings(CROSS), methods={"distillation": options_of(weight, 2.0, tasks)})
    return Objective(bound, shards, CPU, start_methods(settings, bound, shards))


def test_labels_and_the_teacher_share_the_loss(tmp_path):
    # The teacher says 0 to all: at T = 2, 4 KL((1/2, 1/2) || (1 - s, s)) with s = sigmoid(z / 2).
    np.save(tmp_path / "teacher.npy", np.zeros((12, 1), dtype=np.float32))
    shard = replace(make_shard(CROSS, tmp_path), teacher=tmp_path / "teacher.npy")
    bound = bind(small_model(CROSS))
    batch = np.arange(12)
    both, labels, teacher = (taught(bound, shard, weight).loss("cross", batch).item() for weight in (0.3, 0.0, 1.0))
    assert both == pytest.approx(0.7 * labels + 0.3 * teacher)
    assert labels == pytest.approx(Objective(bound, {"cross": shard}, CPU).loss("cross", batch).item())
    seen = []
    bound.model.heads["cross"].register_forward_hook(lambda module, given, outputs: seen.append(outputs.detach()))
    Objective(bound, {"cross": shard}, CPU).loss("cross", batch)
    share = torch.sigmoid(seen[0] / 2)
    assert teacher == pytest.approx(4 * (-0.5 * (4 * share * (1 - share)).log()).mean().item())


def test_each_example_is_compared_with_its_own_row(tmp_path):
    bound = bind(small_model(CROSS))
    seen = []
    bound.model.heads["cross"].register_forward_hook(lambda module, given, outputs: seen.append(outputs.detach()))
    plain = make_shard(CROSS, tmp_path)
    Objective(bound, {"cross": plain}, CPU).loss("cross", np.arange(12))
    np.save(tmp_path / "own.npy", seen[0].numpy())
    objective = taught(bound, replace(plain, teacher=tmp_path / "own.npy"), 1.0)
    for batch in ([3, 7, 1], [11], list(range(12))):
        assert objective.loss("cross", np.array(batch)).item() == pytest.approx(0.0, abs=1e-12)


def test_tasks_without_a_teacher_have_their_own_loss_alone(tmp_path):
    bound, shard = bind(small_model(CROSS)), make_shard(CROSS, tmp_path)
    objectives = (Objective(bound, {"cross": shard}, CPU), taught(bound, shard, 0.5, ["other"]))
    losses = [objective.loss("cross", np.arange(12)).item() for objective in objectives]
    assert losses[0] == losses[1]
