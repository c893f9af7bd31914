import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedmtl.training.objective import class_weights, example_losses, task_loss

from .small_client import make_task

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
