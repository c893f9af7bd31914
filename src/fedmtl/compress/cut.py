"""What pruning takes out of a model; without torch, as studies say it before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """What to take out: a share of the single weights, of each layer's neurons and heads, and whole layers."""

    amount: float = 0.0
    ffn: float = 0.0
    layers: int = 0
    heads: float = 0.0

    @property
    def removes(self) -> bool:
        return bool(self.ffn or self.layers or self.heads)
