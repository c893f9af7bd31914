"""FedProx: mu/2 |w - w0|^2 holds a client near the weights it received.

Li et al. 2020, Federated Optimization in Heterogeneous Networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Config
from fedmtl.sharing.plan import Extra, SharingPlan
from fedmtl.training.local_method import LocalClient, LocalMethod, Part
from fedmtl.training.stacked.blocks import Block
from fedmtl.training.stacked.method import StackedMethod

NAME = "fedprox"


class StackedFedProx(StackedMethod):
    """The same for clients at once, whose received values lie beside those they train."""

    name = NAME
    moves_all_rows = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._mu = float(options["mu"])

    def gradient(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.gradients.add_(block.values - block.before, alpha=self._mu)


class FedProx(LocalMethod):
    """Adds the term's gradient, mu (w - w0), instead of the term itself."""

    name = NAME
    stacked = StackedFedProx

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._mu = float(options["mu"])
        self._received: Tensor | None = None

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._received = client.bound.flat.values.clone()

    def gradient(self, parts: Sequence[Part]) -> None:
        assert self._received is not None
        for part in parts:
            part.gradients.add_(part.values - self._received[part.span], alpha=self._mu)


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    return {"mu": config.training.proximal} if config.training.proximal else None


CAPABILITY = Capability(NAME, FedProx, _client_options)
