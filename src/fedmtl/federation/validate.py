"""What the server checks before an update may count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedmtl.federation.messages import Job, Update
from fedmtl.model.keys import HEADS, Key, owner_task
from fedmtl.model.vocabulary import Rows


@dataclass(frozen=True)
class Expected:
    """What a job allows in its answer; small, so that the server need not keep the job."""

    client: str
    round: int
    tasks: tuple[str, ...]
    tensors: Mapping[Key, tuple[torch.Size, torch.dtype]]
    rows: Rows | None
    layers: tuple[str, ...] = ()


def expect(job: Job) -> Expected:
    tensors = {key: (tensor.shape, tensor.dtype) for key, tensor in job.weights.items() if key.scope != "fixed"}
    layers = tuple(job.settings.get("measured_layers", ()))
    return Expected(job.client, job.round, job.tasks, tensors, job.rows, layers)


def refusal(update: Update, expected: Expected, max_norm: float | None = None) -> str | None:
    """Why the update must not count, or None if it may."""
    if update.client != expected.client:
        return f"answered as {update.client}"
    if update.round != expected.round:
        return f"is for round {update.round}; round {expected.round} is open"
    if not update.tasks or not set(update.tasks) <= set(expected.tasks):
        return f"claims the tasks {', '.join(update.tasks)}; it was given {', '.join(expected.tasks)}"
    if set(update.num_examples) != set(update.tasks) or any(n < 1 for n in update.num_examples.values()):
        return "its example counts do not fit its tasks"
    if not set(update.seen) <= set(update.tasks):
        return "it trained on tasks that it does not return"
    if not _are_equal(update.rows, expected.rows):
        return "its token rows are not those it was sent"
    if not set(update.inner_products) <= set(expected.layers) or not all(
        map(_are_products, update.inner_products.values())
    ):
        return "its inner products are not those it was asked for"
    return _refused_tensor(update, expected, max_norm)


def _are_equal(rows: Rows | None, expected: Rows | None) -> bool:
    if rows is None or expected is None:
        return rows is expected
    return np.array_equal(rows, expected)


def _are_products(products: Sequence[Sequence[float]]) -> bool:
    """Whether vectors can have these: symmetric, and none larger than the two lengths allow."""
    places = range(len(products))
    if any(products[i][i] < 0 for i in places):
        return False
    lengths = [math.sqrt(products[i][i]) for i in places]
    # A little more, for rounding.
    return all(
        products[i][j] == products[j][i] and abs(products[i][j]) <= 1.001 * lengths[i] * lengths[j]
        for i in places
        for j in places
    )


def _refused_tensor(update: Update, expected: Expected, max_norm: float | None) -> str | None:
    square = 0.0
    for key, delta in update.delta.items():
        if key not in expected.tensors:
            is_head = key.name.startswith(HEADS)
            what = f"the head of {owner_task(key.name)}" if is_head else f"{key.name} of scope {key.scope}"
            return f"returned {what}, which it was not sent"
        shape, dtype = expected.tensors[key]
        if delta.shape != shape or delta.dtype != dtype:
            return f"{key.name} is {delta.dtype} {tuple(delta.shape)}; {dtype} {tuple(shape)} was sent"
        norm = float(torch.linalg.vector_norm(delta))
        if not math.isfinite(norm):
            return f"{key.name} holds values that are not numbers"
        square += norm * norm
    if max_norm is not None and math.sqrt(square) > max_norm:
        return f"its length {math.sqrt(square):.3g} is over federation.max_update_norm {max_norm:g}"
    return None
