import math

import pytest
import torch

from fedmtl.config import ServerOptimizerConfig
from fedmtl.methods.server_optimizers import server_step
from fedmtl.sharing.plan import Key

W, OTHER = Key("all", "w"), Key("task:sst2", "heads.sst2.weight")


def settings(kind: str, **values: float) -> ServerOptimizerConfig:
    return ServerOptimizerConfig.model_validate({"kind": kind, **values})


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_none_adds_the_mean_delta_and_leaves_the_rest_alone():
    weights = {W: one(1.0), OTHER: one(7.0)}
    new, slots = server_step(settings("none"), weights, {W: one(0.5)}, {})
    assert new[W].item() == 1.5
    assert new[OTHER] is weights[OTHER]
    assert slots == {}


def test_fedavgm_keeps_momentum_between_rounds():
    kind = settings("fedavgm", momentum=0.5, learning_rate=1.0)
    first, slots = server_step(kind, {W: one(0.0)}, {W: one(1.0)}, {})
    second, _ = server_step(kind, first, {W: one(1.0)}, slots)
    # v1 = 1, w = 1; v2 = 0.5*1 + 1 = 1.5, w = 2.5
    assert (first[W].item(), second[W].item()) == (1.0, 2.5)


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi"])
def test_adaptive_steps_follow_reddi_et_al(kind):
    # m = 0.1*2 = 0.2; v0 = 0.1^2 = 0.01; square = 4
    # adam: v = 0.99*0.01 + 0.01*4 = 0.0499; yogi: v = 0.01 - 0.01*4*sign(0.01 - 4) = 0.05
    v = {"fedadam": 0.0499, "fedyogi": 0.05}[kind]
    config = settings(kind, momentum=0.9, beta2=0.99, tau=0.1, learning_rate=0.5)
    new, slots = server_step(config, {W: one(3.0)}, {W: one(2.0)}, {})
    assert new[W].item() == pytest.approx(3.0 + 0.5 * 0.2 / (math.sqrt(v) + 0.1), abs=1e-12)
    assert slots["momentum"][W].item() == pytest.approx(0.2)
    assert slots["second_moment"][W].item() == pytest.approx(v)


def test_a_value_nobody_returned_keeps_its_state():
    config = settings("fedavgm", momentum=0.5)
    _, slots = server_step(config, {W: one(0.0), OTHER: one(0.0)}, {W: one(1.0), OTHER: one(1.0)}, {})
    new, later = server_step(config, {W: one(0.0), OTHER: one(5.0)}, {W: one(1.0)}, slots)
    assert later["momentum"][OTHER].item() == 1.0
    assert new[OTHER].item() == 5.0
