from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.methods.pcgrad import conflicts, project

EVERYTHING = slice(None)


def everything(one: str, other: str) -> list[slice]:
    return [EVERYTHING]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def vectors(**values: list[float]) -> dict[str, torch.Tensor]:
    return {task: torch.tensor(value, dtype=torch.float64) for task, value in values.items()}


def test_two_opposed_gradients_by_hand():
    # a.b = -1. a + b * 1/2 = (.5, .5), b + a * 1/1 = (0, 1).
    given = vectors(a=[1, 0], b=[-1, 1])
    assert conflicts(given, everything) == [("a", "b")]
    assert project("a", given, everything, generator()).tolist() == [0.5, 0.5]
    assert project("b", given, everything, generator()).tolist() == [0.0, 1.0]
    assert given["a"].tolist() == [1, 0], "what was given is read only"


def test_gradients_that_agree_or_do_not_touch_are_left_as_they_are():
    given = vectors(a=[1, 0, 0], b=[0, 1, 0], c=[1, 1, 3])
    assert conflicts(given, everything) == []
    assert all(project(task, given, everything, generator()) is own for task, own in given.items())


def test_only_what_both_tasks_reach_is_compared_and_changed():
    # Apart over all four, and over the first two; over the last two they agree.
    given = vectors(a=[1, 0, 5, 0], b=[-1, 1, -7, 2])
    assert conflicts(given, lambda *_: [slice(3, 4)]) == []
    assert conflicts(given, lambda *_: []) == []
    parts = [slice(0, 1), slice(1, 2)]
    assert project("a", given, lambda *_: parts, generator()).tolist() == [0.5, 0.5, 5, 0]


def test_the_order_of_the_others_is_drawn_and_matters():
    given = vectors(a=[1, 0], b=[-1, 1], c=[-1, -2])
    # First b: (.5, .5), whose product with c is -1.5: + .3 c = (.2, -.1). First c: + .2 c = (.8, -.4); + .6 b.
    found = {tuple(project("a", given, everything, generator(seed)).tolist()) for seed in range(20)}
    rounded = {tuple(round(value, 9) + 0.0 for value in own) for own in found}
    assert rounded == {(0.2, -0.1), (0.2, 0.2)}


def reference(own: np.ndarray, others: list[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Algorithm 1 of the paper, line by line."""
    projected = own.copy()
    for j in order:
        if projected @ others[j] < 0:
            projected = projected - (projected @ others[j]) / (others[j] @ others[j]) * others[j]
    return projected


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 6))
def test_any_gradients_come_out_as_of_the_papers_algorithm(seed, num_tasks, size):
    drawn = generator(seed).normal(size=(num_tasks, size))
    given = {str(i): torch.from_numpy(row) for i, row in enumerate(drawn)}
    for i in range(num_tasks):
        others = [drawn[j] for j in range(num_tasks) if j != i]
        wanted = reference(drawn[i], others, generator(seed).permutation(num_tasks - 1))
        assert project(str(i), given, everything, generator(seed)).numpy() == pytest.approx(wanted, abs=1e-9)
    apart = [(str(i), str(j)) for i, j in combinations(range(num_tasks), 2) if drawn[i] @ drawn[j] < 0]
    assert conflicts(given, everything) == apart
