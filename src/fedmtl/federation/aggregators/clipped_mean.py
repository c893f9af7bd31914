"""A mean of updates whose norm is clipped, which bounds what one hostile client can do.

Clipping to the median norm follows the norm bounding of Sun et al. 2019, Can You Really Backdoor Federated Learning?,
with a bound that is measured, per scope, in the round before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights

NORMS = "norms"
# Updates that wait for a first median of norms; more would cost memory and tell little more.
MOST_WAITING = 64
_BOUNDS = TypeAdapter(dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]])


class ClippedMean:
    """A mean of updates whose norm in each scope is clipped to the median norm of that scope in the last round.

    Updates stream by. Where a scope has no norms of a last round, the first updates wait, `MOST_WAITING` of them at
    most, for the median of their norms.
    """

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA) -> None:
        self._mean = Mean(before)
        self._bounds: dict[str, float] = dict(extra.values.get(NORMS, {}))
        self._norms: dict[str, list[float]] = {}
        self._waiting: list[tuple[Update, Mapping[str, float], dict[str, float]]] = []

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        norms = scope_norms(update.delta)
        for scope, norm in norms.items():
            self._norms.setdefault(scope, []).append(norm)
        self._waiting.append((update, weights, norms))
        # In the order of `add`, so nobody passes one that waits.
        waits = len(self._waiting) > 1 or not norms.keys() <= self._bounds.keys()
        if not waits or len(self._waiting) >= MOST_WAITING:
            self._release()

    def result(self) -> Weights:
        """The mean, which may be called once."""
        self._release()
        return self._mean.result()

    def remember(self) -> Extra:
        """The bounds of the next round; a scope that nobody moved has the one it had."""
        return Extra({NORMS: {**self._bounds, **_medians(self._norms)}})

    @staticmethod
    def check(extra: Extra) -> None:
        """Raise unless these are bounds."""
        if extra.tensors or set(extra.values) - {NORMS}:
            raise ValueError("clipped_mean remembers norms alone")
        _BOUNDS.validate_python(extra.values.get(NORMS, {}))

    def _release(self) -> None:
        self._bounds = {**_medians(self._norms), **self._bounds}
        for update, weights, norms in self._waiting:
            factors = {scope: _factor(norm, self._bounds.get(scope)) for scope, norm in norms.items()}
            self._mean.add(update, weights, factors)
        self._waiting = []


def scope_norms(delta: Mapping[Key, torch.Tensor]) -> dict[str, float]:
    """The norm of what an update brings of each scope."""
    squares: dict[str, float] = {}
    for key, value in delta.items():
        norm = float(torch.linalg.vector_norm(value))
        squares[key.scope] = squares.get(key.scope, 0.0) + norm * norm
    return {scope: math.sqrt(square) for scope, square in squares.items()}


def _medians(norms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The lower median by scope: of two clients the smaller, so that one of two cannot lift the bound alone."""
    lower = {scope: sorted(of_scope)[(len(of_scope) - 1) // 2] for scope, of_scope in norms.items()}
    # A bound of 0 would hold a value where it is for good.
    return {scope: norm for scope, norm in lower.items() if norm > 0}


def _factor(norm: float, bound: float | None) -> float:
    return 1.0 if bound is None or norm <= bound else bound / norm
