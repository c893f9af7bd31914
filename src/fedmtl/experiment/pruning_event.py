"""What a run says of its pruning after every round."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fedmtl.federation.messages import Round
from fedmtl.federation.pruning import share_after, sparsity
from fedmtl.federation.strategy import Strategy


def pruning_event(turn: Round, strategy: Strategy, linear: Collection[str]) -> dict[str, Any]:
    """How sparse the model is after a round; counts, so that the shares can be recomputed."""
    assert strategy.pruning is not None
    return {
        "event": "pruning",
        "round": turn.number,
        "target": share_after(strategy.pruning, turn.number),
        "pruned": sum(int(mask.sum()) for mask in turn.state.pruned.values()),
        **sparsity(turn.state.weights, linear),
    }
