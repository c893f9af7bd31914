"""Gradients that pull apart: PCGrad (Yu et al. 2020, Gradient Surgery for Multi-Task Learning, algorithm 1).

A task's gradient loses what points against another's, the others being taken in random order. Two gradients are
compared over the values that both tasks reach; what one task reaches alone is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Config
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Extra, SharingPlan
from fedmtl.training.local_method import Finished, LocalClient, LocalMethod, Shared
from fedmtl.training.stacked.method import StackedMethod

NAME = "pcgrad"
CONFLICTS = "conflicts"


class NothingProjected(StackedMethod):
    """A client with one task has no gradients that pull apart."""

    name = NAME
    knows_several_tasks = False


class PcGrad(LocalMethod):
    """Projects the gradients of a joint step, and sends the share of pairs of tasks whose gradients pulled apart."""

    name = NAME
    stacked = NothingProjected

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seed = self._num_apart = self._num_pairs = 0

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._seed = client.seed

    def join(self, step: int, gradients: Mapping[str, Tensor], shared: Shared) -> Iterable[tuple[str, Tensor]] | None:
        apart = conflicts(gradients, shared)
        self._num_apart += len(apart)
        self._num_pairs += math.comb(len(gradients), 2)
        if not apart:
            return None
        generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "pcgrad", step)))
        return ((task, project(task, gradients, shared, generator)) for task in gradients)

    def finish(self, tasks: Sequence[str]) -> Finished:
        if not self._num_pairs:
            return Finished()
        return Finished(sent=Extra({CONFLICTS: self._num_apart / self._num_pairs}))


def conflicts(gradients: Mapping[str, Tensor], shared: Shared) -> list[tuple[str, str]]:
    """The pairs of tasks whose gradients point apart; `shared` says which parts two tasks have in common."""
    return [
        (one, other)
        for one, other in combinations(gradients, 2)
        if _dot(gradients[one], gradients[other], shared(one, other)) < 0
    ]


def project(task: str, gradients: Mapping[str, Tensor], shared: Shared, generator: np.random.Generator) -> Tensor:
    """The task's gradient without what points against the others'; itself, not a copy, where nothing does."""
    others = [other for other in gradients if other != task]
    projected = gradients[task]
    for number in generator.permutation(len(others)):
        other = gradients[others[number]]
        spans = shared(task, others[number])
        against = _dot(projected, other, spans)
        square = _dot(other, other, spans)
        if against < 0 and square > 0:
            projected = projected.clone() if projected is gradients[task] else projected
            for span in spans:
                projected[span].sub_(other[span], alpha=against / square)
    return projected


def _dot(first: Tensor, second: Tensor, spans: Sequence[slice]) -> float:
    return sum(float(first[span].dot(second[span])) for span in spans)


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    return {} if config.training.gradients == "pcgrad" else None


def check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why what a client sent is no share of conflicts."""
    share = extra.values.get(CONFLICTS, 0.0)
    is_share = type(share) in (int, float) and 0 <= share <= 1
    return None if is_share and set(extra.values) <= {CONFLICTS} and not extra.tensors else "its conflicts are no share"


CAPABILITY = Capability(NAME, PcGrad, _client_options, check_sent=check_sent)
