"""Multi-Krum within each task (Blanchard et al. 2017, Machine Learning with Adversaries).

Of the clients of a task in a scope, those count whose updates are nearest to those of most others; the rest is left out
of the round. A client's score is the sum of the squared distances, over the scope's values, to its nearest n - f - 2
fellows (one at least), where f of n may be hostile, and the n - f lowest scores are averaged by their weights. Over all
clients, Krum would leave out whole tasks: distances are measured within a task, and a task has the weight of all its
clients whoever is left out. The paper's guarantee needs n >= 2f + 3; with three clients this keeps the closest pair,
which is right where two honest clients are nearer to each other than to the hostile one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmtl.federation.aggregators.by_coordinate import COLUMNS, num_hostile
from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.aggregators.protocol import WaitingUpdates
from fedmtl.federation.aggregators.within_tasks import clients_by_task, factors_to_median
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Extra, Weights
from fedmtl.timing import timed


class MultiKrum:
    """The mean of those clients of each task that are nearest to each other, without the share `hostile` of them."""

    def __init__(self, before: Weights, extra: Extra = NO_EXTRA, *, hostile: float) -> None:
        self._before, self._hostile = before, hostile
        self._waiting = WaitingUpdates(before)
        self._weights: dict[str, Mapping[str, float]] = {}

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        self._waiting.add(update, weights)
        self._weights[update.client] = weights

    @timed("averaging")
    def result(self) -> Weights:
        """The mean of the chosen updates."""
        updates = self._waiting.updates
        clipping = factors_to_median(updates)
        counted: list[dict[str, float]] = [dict.fromkeys(of_update, 0.0) for of_update in clipping]
        moving: list[dict[str, float]] = [dict.fromkeys(of_update, 0.0) for of_update in clipping]
        for scope, distances in self._distances().items():
            numbers = [number for number, of_update in enumerate(clipping) if scope in of_update]
            there = [updates[number] for number in numbers]
            for clients in clients_by_task(there, [self._weights[one.client][scope] for one in there], scope):
                chosen = self._choose(distances, clients.members) if clients.is_comparable else clients.members
                kept = sum(
                    weight for one, weight in zip(clients.members, clients.weights, strict=True) if one in chosen
                )
                for one, weight in zip(clients.members, clients.weights, strict=True):
                    if one not in chosen or kept <= 0:
                        continue
                    part = weight * clients.weight / kept
                    counted[numbers[one]][scope] += part
                    factor = 1.0 if clients.is_comparable else clipping[numbers[one]][scope]
                    moving[numbers[one]][scope] += part * factor
        mean = Mean(self._before)
        for update, weights, moves in zip(updates, counted, moving, strict=True):
            factors = {scope: moves[scope] / weight if weight > 0 else 0.0 for scope, weight in weights.items()}
            mean.add(update, weights, factors)
        return mean.result()

    def remember(self) -> Extra:
        """Nothing: every round begins anew."""
        return NO_EXTRA

    def _distances(self) -> dict[str, Tensor]:
        """By scope, the squared distances between the clients that returned it, summed value by value."""
        found: dict[str, Tensor] = {}
        for key in self._waiting.keys():  # noqa: SIM118
            of_value = _squared_distances(self._waiting.deltas(key)[0].flatten(1))
            found[key.scope] = found[key.scope] + of_value if key.scope in found else of_value
        return found

    def _choose(self, distances: Tensor, members: Sequence[int]) -> set[int]:
        """Those of a task's clients that count; of equal scores the first in the order of names."""
        hostile = num_hostile(len(members), self._hostile)
        nearest = max(1, len(members) - hostile - 2)
        positions = torch.tensor(members)
        among = distances[positions][:, positions]
        among.fill_diagonal_(torch.inf)
        scores = among.sort(dim=1).values[:, :nearest].sum(dim=1).tolist()
        order = sorted(range(len(members)), key=lambda one: (scores[one], one))
        return {members[one] for one in order[: len(members) - hostile]}


def _squared_distances(deltas: Tensor) -> Tensor:
    """Between all rows of (clients, columns), in double precision."""
    squares = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    for first in range(0, deltas.shape[1], COLUMNS):
        some = deltas[:, first : first + COLUMNS]
        # Not by products, whose difference is rounding where updates are nearly equal.
        squares.add_(torch.cdist(some, some, compute_mode="donot_use_mm_for_euclid_dist").double().square())
    return squares
