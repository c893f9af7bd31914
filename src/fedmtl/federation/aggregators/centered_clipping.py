"""Centered clipping (Karimireddy et al. 2021, Learning from History for Byzantine Robust Optimization).

An update counts by how it differs from what the federation did in the last round, and that difference is clipped: with
the center v and the bound t of a scope, v + mean of (u_i - v) * min(1, t / |u_i - v|). The center is the last round's
combined delta, which an attacker of one round cannot choose, and the bound the median distance from it in the round
before, by scope. One pass over the updates is made (L = 1 in the paper), so they stream by; the center costs the state
of a run the size of one model. A token row that a client did not return is a zero delta, as it is in a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedmtl.federation.aggregators.clipped_mean import Clipping, check_bounds
from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights, take_rows

CENTER = "center"


class CenteredClipping:
    """The center of each scope, plus the mean of clipped differences from it; it streams."""

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA) -> None:
        self._mean = Mean(before)
        self._center = dict(extra.slot(CENTER))
        self._squares = {key: _square(value) for key, value in self._center.items()}
        self._clipping = Clipping(before, extra, self._release)
        # By value, the weight of all updates, and what of it remains after clipping.
        self._totals: dict[Key, float] = {}
        self._moving: dict[Key, float] = {}
        self._result: Weights = {}

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        squares: dict[str, float] = {}
        for key, delta in update.delta.items():
            squares[key.scope] = squares.get(key.scope, 0.0) + self._distance(update, key, delta)
        self._clipping.add(update, weights, {scope: math.sqrt(max(0.0, square)) for scope, square in squares.items()})

    def result(self) -> Weights:
        """The combined delta, which may be called once."""
        self._clipping.finish()
        self._result = self._mean.result()
        for key, value in self._result.items():
            if key in self._center:
                # v + mean of c (u - v) = mean of c u + v (1 - mean of c)
                value.add_(self._center[key], alpha=1.0 - self._moving[key] / self._totals[key])
        return self._result

    def remember(self) -> Extra:
        """The center and the bounds of the next round; a value that nobody moved has the center it had."""
        return Extra(self._clipping.remember(), {CENTER: {**self._center, **self._result}})

    @staticmethod
    def check(extra: Extra) -> None:
        """Raise unless these are bounds and a center."""
        if set(extra.tensors) - {CENTER}:
            raise ValueError("centered_clipping remembers norms and a center alone")
        check_bounds(extra)

    def _release(self, update: Update, weights: Mapping[str, float], factors: Mapping[str, float]) -> None:
        self._mean.add(update, weights, factors)
        for key in update.delta:
            weight = weights[key.scope]
            self._totals[key] = self._totals.get(key, 0.0) + weight
            self._moving[key] = self._moving.get(key, 0.0) + weight * factors[key.scope]

    def _distance(self, update: Update, key: Key, delta: Tensor) -> float:
        """The squared distance of a delta from the center."""
        center = self._center.get(key)
        if center is None:
            return _square(delta)
        if delta.shape == center.shape:
            return _square(delta - center)
        assert update.rows is not None
        there = take_rows(center, update.rows)
        # Rows that the client did not return are as far from the center as zero is.
        return _square(delta - there) + self._squares[key] - _square(there)


def _square(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value)) ** 2
