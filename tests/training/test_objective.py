import math

import pytest
import torch
from torch.nn import functional as F

from fedmtl.training.local import task_loss

from .small_client import make_task

CE = make_task("ce", labels=("x", "y", "z"))
BCE = make_task("bce", outputs=1)
MSE = make_task("mse", kind="regression", labels=())


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_one_output_is_weighted_by_its_label():
    outputs, labels = torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 1])
    loss = task_loss(BCE, outputs, labels, torch.tensor([3.0, 1.0]))
    assert loss.item() == pytest.approx((3 * softplus(2) + softplus(1)) / 4)


@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 3.0]])
def test_weighted_cross_entropy_is_torchs(weight):
    outputs, labels = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2] * 3)
    given = None if weight is None else torch.tensor(weight)
    expected = F.cross_entropy(outputs, labels, weight=given)
    assert task_loss(CE, outputs, labels, given).item() == pytest.approx(expected.item(), rel=1e-6)
