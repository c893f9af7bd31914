import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedmtl.training.objective import Objective, class_weights, example_losses, label_offsets, task_loss

from .small_client import CPU, CROSS, bind, make_settings, make_shard, make_task, small_model

CE = make_task("ce", labels=("x", "y", "z"))
BCE = make_task("bce", outputs=1)
MSE = make_task("mse", kind="regression", labels=())


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_cross_entropy_is_the_mean_log_loss():
    # Logits 0, 0, ln 2 give probabilities 1/4, 1/4, 1/2.
    outputs = torch.tensor([[0.0, 0.0, math.log(2)]] * 2)
    assert example_losses(CE, outputs, torch.tensor([0, 2])).tolist() == pytest.approx([math.log(4), math.log(2)])
    assert task_loss(CE, outputs, torch.tensor([0, 2])).item() == pytest.approx(1.5 * math.log(2))


def test_one_output_is_scored_with_binary_cross_entropy():
    # -log sigmoid(-2) = softplus(2) for label 0, -log sigmoid(-1) = softplus(1) for label 1.
    outputs, labels = torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 1])
    assert example_losses(BCE, outputs, labels).tolist() == pytest.approx([softplus(2), softplus(1)])


def test_one_output_is_weighted_by_its_label():
    outputs, labels = torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 1])
    loss = task_loss(BCE, outputs, labels, torch.tensor([3.0, 1.0]))
    assert loss.item() == pytest.approx((3 * softplus(2) + softplus(1)) / 4)


def test_a_regression_is_scored_with_the_squared_error():
    outputs, labels = torch.tensor([[0.5], [1.0]], dtype=torch.float64), torch.tensor([0.0, 0.25])
    assert example_losses(MSE, outputs, labels).tolist() == [0.25, 0.5625]
    assert task_loss(MSE, outputs, labels).item() == 0.40625


@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 3.0]])
def test_weighted_cross_entropy_is_torchs(weight):
    outputs, labels = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2] * 3)
    given = None if weight is None else torch.tensor(weight)
    expected = F.cross_entropy(outputs, labels, weight=given)
    assert task_loss(CE, outputs, labels, given).item() == pytest.approx(expected.item(), rel=1e-6)


def test_balanced_weights_follow_the_clients_own_counts():
    # Counts 4, 1, 1 of 6: 6 / (3 * 4) = 0.5, 6 / (3 * 1) = 2.
    task = make_task("t", labels=("x", "y", "z"), class_weights="balanced")
    assert class_weights(task, np.array([0, 0, 1, 0, 2, 0])).tolist() == [0.5, 2.0, 2.0]


def test_balanced_weights_of_a_client_with_one_class_are_finite():
    # Counts 4 and 0: 4 / (2 * 4) for the class it has; the other is never looked up.
    task = make_task("t", class_weights="balanced")
    weights = class_weights(task, np.array([0, 0, 0, 0]))
    assert weights.tolist() == [0.5, 2.0]
    outputs, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    assert task_loss(task, outputs, labels, torch.from_numpy(weights)).item() == pytest.approx(softplus(1))


def test_class_weights_are_the_given_ones_or_none():
    assert class_weights(make_task("t", class_weights=(1.0, 4.0)), np.array([0, 1])).tolist() == [1.0, 4.0]
    assert class_weights(make_task("t"), np.array([0, 1])) is None
    assert class_weights(make_task("t", kind="regression", class_weights="balanced"), np.array([0.3])) is None


def taught(weight, tasks=("cross",)):
    told = {"weight": weight, "temperature": 2.0, "tasks": list(tasks)}
    return replace(make_settings(CROSS), distillation=told)


def test_labels_and_the_teacher_share_the_loss(tmp_path):
    # The teacher says 0 to all: at T = 2, 4 KL((1/2, 1/2) || (1 - s, s)) with s = sigmoid(z / 2).
    np.save(tmp_path / "teacher.npy", np.zeros((12, 1), dtype=np.float32))
    shard = replace(make_shard(CROSS, tmp_path), teacher=tmp_path / "teacher.npy")
    bound = bind(small_model(CROSS))
    batch = np.arange(12)
    both, labels, teacher = (
        Objective(bound, {"cross": shard}, CPU, taught(weight)).loss("cross", batch).item()
        for weight in (0.3, 0.0, 1.0)
    )
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
    objective = Objective(bound, {"cross": replace(plain, teacher=tmp_path / "own.npy")}, CPU, taught(1.0))
    for batch in ([3, 7, 1], [11], list(range(12))):
        assert objective.loss("cross", np.array(batch)).item() == pytest.approx(0.0, abs=1e-12)


def test_tasks_without_a_teacher_have_their_own_loss_alone(tmp_path):
    bound, shards = bind(small_model(CROSS)), {"cross": make_shard(CROSS, tmp_path)}
    losses = [
        Objective(bound, shards, CPU, settings).loss("cross", np.arange(12)).item()
        for settings in (None, taught(0.5, ["other"]))
    ]
    assert losses[0] == losses[1]


def test_outputs_are_offset_by_how_a_clients_labels_differ_from_all():
    # Here 5 + 1 and 1 + 1 of 8: 3/4 and 1/4. Everywhere 7 + 1 and 23 + 1 of 32: 1/4 and 3/4.
    labels = np.array([0, 0, 1, 0, 0, 0])
    settings = make_settings(BCE, logit_adjustment=1, label_counts={"bce": [7, 23], "two": [7, 23]})
    two = label_offsets(make_task("two"), labels, settings)
    assert two.tolist() == pytest.approx([math.log(3), -math.log(3)])
    assert label_offsets(BCE, labels, settings).tolist() == pytest.approx([-2 * math.log(3)])
    half = replace(settings, logit_adjustment=0.5)
    assert label_offsets(BCE, labels, half).tolist() == pytest.approx([-math.log(3)])


def test_a_label_that_a_client_does_not_have_is_offset_as_if_there_were_one():
    # Of three labels only the first two were ever counted: 1, 9, 0 and here 0, 7, 0.
    settings = make_settings(CE, logit_adjustment=1, label_counts={"ce": [1, 9]})
    shares = np.array([1 / 10, 8 / 10, 1 / 10]) / np.array([2 / 13, 10 / 13, 1 / 13])
    assert label_offsets(CE, np.ones(7, int), settings).tolist() == pytest.approx(np.log(shares).tolist())


@pytest.mark.parametrize(
    "options", [{}, {"logit_adjustment": 1}, {"label_counts": {"ce": [1, 2, 3]}}], ids=["none", "no counts", "off"]
)
def test_without_adjustment_or_counts_nothing_is_offset(options):
    assert label_offsets(CE, np.array([0, 1]), make_settings(CE, **options)) is None
    assert (
        label_offsets(MSE, np.array([0.5]), make_settings(MSE, logit_adjustment=1, label_counts={"mse": [1]})) is None
    )


def test_adjusted_training_of_a_skewed_client_finds_what_all_clients_would():
    """A model of no features, that is, a bias: of one client's labels alone it comes to the federation's shares."""
    # ce's loss at outputs z + log(here / everywhere) is lowest where softmax(z) is `everywhere`.
    here, everywhere = np.array([6.0, 2.0]) / 8, np.array([1.0, 3.0]) / 4
    offsets = label_offsets(
        make_task("two"), np.repeat([0, 1], [5, 1]), make_settings(logit_adjustment=1, label_counts={"two": [0, 2]})
    )
    z = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        # the smoothed shares, as the offsets have them
        loss = -(torch.from_numpy(here) * F.log_softmax(z + torch.from_numpy(offsets).double(), 0)).sum()
        (step,) = torch.autograd.grad(loss, z)
        z = (z - 0.5 * step).detach().requires_grad_()
    assert z.softmax(0).tolist() == pytest.approx(everywhere.tolist(), abs=1e-6)
