"""A mean of updates whose norm is clipped, which bounds what one hostile client can do.

Clipping to the median norm follows the norm bounding of Sun et al. 2019, Can You Really Backdoor Federated Learning?,
with a bound that is measured, per scope, in the round before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights

NORMS, SIZES = "norms", "sizes"
# Updates that wait for a first median of norms; more would cost memory and tell little more.
MOST_WAITING = 64
Release = Callable[[Update, Mapping[str, float], Mapping[str, float]], None]
_BOUNDS = TypeAdapter(dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]])

_SIZES = TypeAdapter(dict[str, Annotated[int, Field(ge=0, strict=True)]])


class Clipping:
    """Clips updates, scope by scope, to the median norm of the round before, and lets them go as soon as it can.

    Where a scope has no norms of a last round, the first updates wait, `MOST_WAITING` of them at most, for the median
    of their norms. So they do where a scope has other values than in that round, because a layer was moved.
    `release` gets every update in the order of `add`, with its weights and what to multiply it by.
    """

    def __init__(self, before: Weights, extra: Extra, release: Release) -> None:
        self._sizes: dict[str, int] = {}
        for key, value in before.items():
            self._sizes[key.scope] = self._sizes.get(key.scope, 0) + value.numel()
        sizes = extra.values.get(SIZES, {})
        self._bounds: dict[str, float] = {
            scope: bound
            for scope, bound in extra.values.get(NORMS, {}).items()
            # An earlier version remembered no sizes.
            if sizes.get(scope, self._sizes.get(scope)) == self._sizes.get(scope)
        }
        self._release_one = release
        self._norms: dict[str, list[float]] = {}
        self._waiting: list[tuple[Update, Mapping[str, float], Mapping[str, float]]] = []

    def add(self, update: Update, weights: Mapping[str, float], norms: Mapping[str, float]) -> None:
        """Take in an update with its norm in each scope, or whatever is to be bounded."""
        for scope, norm in norms.items():
            self._norms.setdefault(scope, []).append(norm)
        self._waiting.append((update, weights, norms))
        # In the order of `add`, so nobody passes one that waits.
        waits = len(self._waiting) > 1 or not norms.keys() <= self._bounds.keys()
        if not waits or len(self._waiting) >= MOST_WAITING:
            self.finish()

    def finish(self) -> None:
        """Release all that wait."""
        self._bounds = {**self._medians(), **self._bounds}
        for update, weights, norms in self._waiting:
            factors = {scope: clip_factor(norm, self._bounds.get(scope)) for scope, norm in norms.items()}
            self._release_one(update, weights, factors)
        self._waiting = []

    def remember(self) -> dict[str, Any]:
        """The bounds of the next round, of scopes of these sizes; a scope that nobody moved has the one it had."""
        bounds = {**self._bounds, **self._medians()}
        return {NORMS: bounds, SIZES: {scope: self._sizes[scope] for scope in bounds if scope in self._sizes}}

    def _medians(self) -> dict[str, float]:
        medians = {scope: lower_median(of_scope) for scope, of_scope in self._norms.items()}
        # A bound of 0 would hold a value where it is for good.
        return {scope: norm for scope, norm in medians.items() if norm > 0}


class ClippedMean:
    """A mean of updates whose norm in each scope is clipped to the median norm of that scope in the last round."""

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA) -> None:
        self._mean = Mean(before)
        self._clipping = Clipping(before, extra, self._mean.add)

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        self._clipping.add(update, weights, scope_norms(update.delta))

    def result(self) -> Weights:
        """The mean, which may be called once."""
        self._clipping.finish()
        return self._mean.result()

    def remember(self) -> Extra:
        """The bounds of the next round."""
        return Extra(self._clipping.remember())

    @staticmethod
    def check(extra: Extra) -> None:
        """Raise unless these are bounds."""
        if extra.tensors:
            raise ValueError("clipped_mean remembers norms alone")
        check_bounds(extra)


def check_bounds(extra: Extra) -> None:
    """Raise unless the plain values of an extra are those that a Clipping remembered."""
    if set(extra.values) - {NORMS, SIZES}:
        raise ValueError("a rule that clips remembers norms and the sizes of scopes alone")
    _SIZES.validate_python(extra.values.get(SIZES, {}))
    _BOUNDS.validate_python(extra.values.get(NORMS, {}))


def scope_norms(delta: Mapping[Key, torch.Tensor]) -> dict[str, float]:
    """The norm of what an update brings of each scope."""
    squares: dict[str, float] = {}
    for key, value in delta.items():
        norm = float(torch.linalg.vector_norm(value))
        squares[key.scope] = squares.get(key.scope, 0.0) + norm * norm
    return {scope: math.sqrt(square) for scope, square in squares.items()}


def lower_median(numbers: Sequence[float]) -> float:
    """The lower median: of two clients the smaller, so that one of two cannot lift the bound alone."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


def clip_factor(norm: float, bound: float | None) -> float:
    """What to multiply a delta of that norm by, so that it has at most the bound; None is no bound."""
    return 1.0 if bound is None or norm <= bound else bound / norm
