"""What the server does with the mean delta. Adaptive ones: Reddi et al. 2021, Adaptive Federated Optimization.

Where we differ: as in its algorithm 2 there is no bias correction, and v starts at tau squared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import ServerOptimizerConfig
from fedmtl.federation.messages import State
from fedmtl.federation.server_method import ServerMethod, ServerSetup
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights
from fedmtl.timing import timed

NAME = "server_optimizer"
SLOTS = {"none": (), "fedavgm": ("momentum",)}
ADAPTIVE = ("momentum", "second_moment")

Slots = dict[str, Weights]


class ServerOptimizer(ServerMethod):
    """Adds the mean delta to the weights, or takes it as a gradient; its moments ride in the state."""

    name = NAME

    def __init__(self, settings: ServerOptimizerConfig) -> None:
        self._settings = settings

    def step(self, state: State, delta: Weights) -> tuple[Weights, Extra]:
        moments = state.extra.get(NAME, NO_EXTRA).tensors
        weights, slots = server_step(self._settings, state.weights, delta, moments)
        return weights, Extra(tensors=slots)

    def check(self, extra: Extra) -> None:
        if extra.values or not set(extra.tensors) <= set(SLOTS.get(self._settings.kind, ADAPTIVE)):
            raise ValueError(f"{self._settings.kind} has other moments")


@timed("server optimizer")
def server_step(
    settings: ServerOptimizerConfig, weights: Weights, mean_delta: Weights, slots: Mapping[str, Mapping[Key, Tensor]]
) -> tuple[Weights, Slots]:
    """The new weights and the optimizer's new state; a value without a delta keeps its bits and its state."""
    new = dict(weights)
    after: Slots = {name: dict(values) for name, values in slots.items()}
    for key, delta in mean_delta.items():
        if settings.kind == "none":
            step = delta
        elif settings.kind == "fedavgm":
            step = _momentum(key, delta, settings.momentum, after, 1.0)
        else:
            m = _momentum(key, delta, settings.momentum, after, 1.0 - settings.momentum)
            step = m / (_second_moment(key, delta, settings, after).sqrt() + settings.tau)
        new[key] = (
            weights[key] + settings.learning_rate * step if settings.learning_rate != 1.0 else weights[key] + step
        )
    return new, after


def _momentum(key: Key, delta: Tensor, decay: float, slots: Slots, gain: float) -> Tensor:
    momenta = slots.setdefault("momentum", {})
    before = momenta.get(key)
    momenta[key] = gain * delta if before is None else decay * before + gain * delta
    return momenta[key]


def _second_moment(key: Key, delta: Tensor, settings: ServerOptimizerConfig, slots: Slots) -> Tensor:
    moments = slots.setdefault("second_moment", {})
    v = moments.get(key)
    if v is None:
        v = torch.full_like(delta, settings.tau**2)
    square = delta * delta
    if settings.kind == "fedadam":
        moments[key] = settings.beta2 * v + (1.0 - settings.beta2) * square
    else:
        moments[key] = v - (1.0 - settings.beta2) * square * torch.sign(v - square)
    return moments[key]


def _open(setup: ServerSetup) -> ServerOptimizer | None:
    settings = setup.config.federation.server_optimizer
    is_plain_sum = settings.kind == "none" and settings.learning_rate == 1.0
    return None if is_plain_sum else ServerOptimizer(settings)


CAPABILITY = Capability(NAME, server=_open)
