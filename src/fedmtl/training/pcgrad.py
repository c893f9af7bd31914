"""Gradients that pull apart: PCGrad (Yu et al. 2020, Gradient Surgery for Multi-Task Learning, algorithm 1).

A task's gradient loses what points against another's, the others being taken in random order. Two gradients are
compared over the values that both tasks reach; what one task reaches alone is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np
from torch import Tensor

Shared = Callable[[str, str], Sequence[slice]]


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
    own = gradients[task]
    for number in generator.permutation(len(others)):
        other = gradients[others[number]]
        places = shared(task, others[number])
        against = _dot(own, other, places)
        square = _dot(other, other, places)
        if against < 0 and square > 0:
            own = own.clone() if own is gradients[task] else own
            for place in places:
                own[place].sub_(other[place], alpha=against / square)
    return own


def _dot(first: Tensor, second: Tensor, places: Sequence[slice]) -> float:
    return sum(float(first[place].dot(second[place])) for place in places)
