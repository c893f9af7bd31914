"""The steps of several clients side by side: who trains on which examples at which rate, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from fedmtl.model.keys import Key
from fedmtl.model.vocabulary import Rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.task import Task
from fedmtl.training.learning_rate import rate_factor
from fedmtl.training.local import num_steps, planned_steps
from fedmtl.training.objective import class_weights
from fedmtl.training.settings import LocalSettings
from fedmtl.training.stacked.store import NOTHING, TokenStore
from fedmtl.training.task_order import Step

# Places of a client are rounded up to this many, so that few shapes occur.
PLACES = 64
# Steps that are planned at a time: while they are computed on a GPU, the next are planned; it waits for the first.
FIRST_STEPS, STEPS = 16, 128


@dataclass(frozen=True)
class Member:
    """A client of a stack: its one task, its examples, and the values it starts from by canonical name."""

    client: str
    task: Task
    shard: Shard
    seed: int
    keys: dict[str, Key]
    rows: Rows | None


@dataclass(frozen=True)
class StackPlan:
    """Some steps, as (steps, clients, ...): sequences, labels, the weight of each example in its loss, how far to step.

    `factors` are the learning rate, the two corrections of AdamW's means for their start, and the loss's weight; a rate
    of minus one marks a client that has no step.
    """

    sequences: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    factors: np.ndarray
    num_places: np.ndarray
    widths: np.ndarray
    counts: np.ndarray


def plan_steps(
    members: Sequence[Member], store: TokenStore, settings: LocalSettings, round_number: int
) -> Iterator[StackPlan]:
    """What every client does in each step, some steps at a time; those with fewer steps rest at the end."""
    own = [planned_steps({m.task.name: m.shard}, settings, m.seed, round_number) for m in members]
    counts = [num_steps(member.shard, settings) for member in members]
    factors = _factors(counts, settings, round_number)
    first, size = 0, FIRST_STEPS
    while first < max(counts):
        steps = [list(islice(each, size)) for each in own]
        yield _plan(members, steps, [factors[count][first : first + size] for count in counts], store, settings)
        first, size = first + size, STEPS


def _plan(
    members: Sequence[Member],
    planned: Sequence[Sequence[Step]],
    shared: Sequence[np.ndarray],
    store: TokenStore,
    settings: LocalSettings,
) -> StackPlan:
    longest, size = max(map(len, planned)), settings.batch_size
    parts = num_parts(members[0].task)
    shape = (longest, len(members), size)
    sequences = np.full((longest, len(members), parts, size), NOTHING, np.int64)
    labels, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    factors = np.zeros((longest, 4, len(members)))
    factors[:, 0] = -1.0
    factors[:, 1:3] = 1.0
    for k, (member, steps) in enumerate(zip(members, planned, strict=True)):
        if not steps:
            continue
        balance = class_weights(member.task, member.shard.labels[member.shard.indices])
        sizes = np.asarray([len(batch) for _, batch in steps])
        examples = np.concatenate([batch for _, batch in steps])
        row = np.repeat(np.arange(len(steps)), sizes)
        column = np.arange(len(examples)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        own_labels = member.shard.labels[examples]
        sequences[row, k, :, column] = store.sequences(member.shard.tokens, examples)
        labels[row, k, column] = own_labels
        weights[row, k, column] = 1.0 if balance is None else balance[own_labels]
        there = factors[: len(steps), :, k]
        there[:, :3] = shared[k]
        there[:, 0] *= settings.learning_rates[member.task.name]
        there[:, 3] = settings.loss_weights[member.task.name]
    flat = sequences.reshape(longest, len(members), parts * size)
    lengths = store.host_lengths[flat]
    places = lengths.sum(-1).max(-1)
    counts = (weights > 0).sum(-1)
    return StackPlan(
        flat, labels, weights, factors, -(-places // PLACES) * PLACES, _widths(lengths.max((1, 2))), counts
    )


def num_parts(task: Task) -> int:
    return 2 if task.is_dual else 1


def _factors(counts: Sequence[int], settings: LocalSettings, round_number: int) -> dict[int, np.ndarray]:
    """For each number of steps: what the rate is multiplied by, and the corrections of AdamW's means, step by step."""
    found = {}
    for count in set(counts):
        number = np.arange(count)
        rates = [rate_factor(settings, round_number - 1 + done) for done in (number / max(1, count)).tolist()]
        means = [1.0 - settings.betas[0] ** (number + 1.0), np.sqrt(1.0 - settings.betas[1] ** (number + 1.0))]
        found[count] = np.stack([np.asarray(rates), *means], 1)
    return found


def _widths(longest: np.ndarray) -> np.ndarray:
    """The longest sequence of each step rounded up to a power of two, from 128 on to a multiple of 64."""
    powers = 2 ** np.ceil(np.log2(np.maximum(longest, 16))).astype(np.int64)
    return np.where(longest <= 128, powers, -(-longest // 64) * 64)


def folders(members: Sequence[Member]) -> tuple[Path, ...]:
    return tuple(sorted({member.shard.tokens for member in members}))
