import torch

from fedmtl.sharing.plan import Key
from fedmtl.training.optimizer import FlatOptimizer
from training.small_client import SINGLE, bind, make_settings, small_model, start_methods


def test_the_gradient_pulls_back_what_moved():
    bound = bind(small_model(SINGLE))
    settings = make_settings(SINGLE, proximal=0.5, optimizer="sgd", max_grad_norm=0, weight_decay=0)
    optimizer = FlatOptimizer(bound, settings, start_methods(settings, bound, {}))
    bias = bound.parameters[Key("task:single", "heads.single.bias")]
    with torch.no_grad():
        bias += 2.0
    optimizer.backward("single", bias.sum())
    optimizer.step("single", 1.0)
    # It started at 0. d/dw of 0.5 / 2 * w^2 at w = 2 is 1, on top of the loss's 1: 2 - 1 * 2 = 0.
    assert bias.tolist() == [0.0, 0.0]


def test_it_is_off_where_mu_is_0():
    assert make_settings(SINGLE, proximal=0).methods == {}
    assert make_settings(SINGLE, proximal=0.5).methods == {"fedprox": {"mu": 0.5}}
