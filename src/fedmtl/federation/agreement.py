"""How far tasks pull a layer the same way: the cosine between their updates of a round.

Gradients in conflict are those of Yu et al. 2020 (PCGrad); over a round's updates instead of one step's gradients they
cost the server one mean delta per task, of the movable layers only. A client that trains several tasks in one value
cannot tell whose its delta is. It sends the inner products of its tasks' gradients (`training/task_gradients.py`).

A pair's agreement is the mean of both kinds of evidence: the cosine between the two tasks' mean deltas, and every such
client's cosine, each counted by the examples of the two tasks behind it (by clients where the mean is uniform).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from fedmtl.config import Average
from fedmtl.federation.combine import add_delta
from fedmtl.federation.messages import Update
from fedmtl.sharing.keys import Key, Weights
from fedmtl.sharing.plan import SharingPlan

# A sum's last digits depend on how many threads made it; a decision must not.
DIGITS = 6

Agreement = dict[str, dict[str, float]]


def pair_name(first: str, second: str) -> str:
    return f"{first}/{second}"


class TaskUpdates:
    """Adds up what each task did to each movable layer, update by update; `layers` are layer -> parameter names."""

    def __init__(
        self,
        layers: Mapping[str, Sequence[str]],
        tasks: Sequence[str],
        before: Weights,
        plan: SharingPlan,
        average: Average = "weighted",
    ) -> None:
        self._layers, self._tasks, self._before, self._plan = layers, tasks, before, plan
        self._is_uniform = average == "uniform"
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._counts: dict[tuple[str, str], float] = {}
        self._told: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def add(self, update: Update) -> None:
        for layer, names in self._layers.items():
            users: dict[str, list[str]] = {}
            for task in update.tasks:
                users.setdefault(self._plan.key(names[0], task, update.client).scope, []).append(task)
            for scope, tasks in users.items():
                if len(tasks) == 1:
                    self._add_own(update, layer, scope, tasks[0])
                elif layer in update.inner_products:
                    self._add_told(update, layer, tasks)

    def measure(self) -> Agreement:
        """layer -> pair of tasks -> cosine, of all pairs there is evidence for."""
        found: Agreement = {}
        for layer in self._layers:
            pairs = {}
            for first, second in combinations(self._tasks, 2):
                name = pair_name(first, second)
                evidence = [*self._told.get(layer, {}).get(name, ()), *self._between(layer, first, second)]
                total = sum(weight for _, weight in evidence)
                if total:
                    pairs[name] = round(sum(cosine * weight for cosine, weight in evidence) / total, DIGITS)
            found[layer] = pairs
        return found

    def _add_own(self, update: Update, layer: str, scope: str, task: str) -> None:
        weight = self._weight(update, task)
        for name in self._layers[layer]:
            key = Key(scope, name)
            if key in update.delta:
                if (task, name) not in self._sums:
                    self._sums[task, name] = torch.zeros_like(self._before[key])
                add_delta(self._sums[task, name], update.delta[key], weight, update.rows)
        self._counts[layer, task] = self._counts.get((layer, task), 0.0) + weight

    def _add_told(self, update: Update, layer: str, tasks: Sequence[str]) -> None:
        products = update.inner_products[layer]
        places = {task: number for number, task in enumerate(update.tasks)}
        for first, second in combinations([task for task in self._tasks if task in tasks], 2):
            a, b = places[first], places[second]
            found = cosine(products[a][b], products[a][a], products[b][b])
            if found is not None:
                weight = self._weight(update, first) + self._weight(update, second)
                told = self._told.setdefault(layer, {})
                told.setdefault(pair_name(first, second), []).append((found, weight))

    def _between(self, layer: str, first: str, second: str) -> Iterator[tuple[float, float]]:
        shared = [n for n in self._layers[layer] if (first, n) in self._sums and (second, n) in self._sums]
        products = [
            sum(_dot(self._sums[a, name], self._sums[b, name]) for name in shared)
            for a, b in ((first, second), (first, first), (second, second))
        ]
        found = cosine(*products)
        if found is not None:
            yield found, self._counts[layer, first] + self._counts[layer, second]

    def _weight(self, update: Update, task: str) -> float:
        return 1.0 if self._is_uniform else float(update.num_examples[task])


def cosine(product: float, first: float, second: float) -> float | None:
    """From an inner product and two squared lengths; None where a length is 0."""
    length = math.sqrt(first) * math.sqrt(second)
    return max(-1.0, min(1.0, product / length)) if length > 0 else None


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1).double(), b.reshape(-1).double()))
