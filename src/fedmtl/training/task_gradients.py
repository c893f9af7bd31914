"""Whether the tasks of one client pull a layer the same way: inner products of what their gradients add up to.

Gradients and not movements: with momentum a step of one task is mostly what the steps of the others left behind. Two
tasks that take turns with gradients at right angles would show a cosine of .995 under a beta of .9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedmtl.model.binding import BoundModel
from fedmtl.sharing.keys import Key, layer_of


class TaskGradients:
    """Adds up each task's gradients of the layers in which several tasks of this client share a value.

    It costs one copy of these layers per task, and nothing for a client with one task.
    """

    def __init__(self, bound: BoundModel, layers: Sequence[str]) -> None:
        self._bound = bound
        users = Counter(key for view in bound.views.values() for key in view.values())
        self._keys: dict[str, list[Key]] = {layer: [] for layer in layers}
        for key in bound.flat.places:
            if users[key] > 1 and layer_of(key.name) in self._keys:
                self._keys[layer_of(key.name)].append(key)
        self._sums: dict[tuple[str, Key], Tensor] = {}

    def add(self, task: str, reached: Collection[Key]) -> None:
        """Take in the gradients that a backward pass of this task left."""
        for keys in self._keys.values():
            for key in keys:
                if key in reached:
                    gradient = self._bound.parameters[key].grad
                    assert gradient is not None
                    if (task, key) in self._sums:
                        self._sums[task, key].add_(gradient)
                    else:
                        self._sums[task, key] = gradient.clone()

    def inner_products(self) -> dict[str, list[list[float]]]:
        """For each layer, the products of every two tasks, in the order of the bound tasks."""
        tasks = list(self._bound.views)
        return {
            layer: [[self._product(keys, a, b) for b in tasks] for a in tasks]
            for layer, keys in self._keys.items()
            if keys
        }

    def _product(self, keys: Sequence[Key], a: str, b: str) -> float:
        both = [(self._sums[a, key], self._sums[b, key]) for key in keys if {(a, key), (b, key)} <= self._sums.keys()]
        return sum(float(torch.dot(x.reshape(-1).double(), y.reshape(-1).double())) for x, y in both)
