"""What came of training a stack, client by client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedmtl.sharing.keys import is_personal
from fedmtl.training.local import Trained, TrainingFailed, divergence, num_steps
from fedmtl.training.optimizer import SLOTS
from fedmtl.training.settings import LocalSettings
from fedmtl.training.stacked.plan import Member, Named, close_kept
from fedmtl.training.stacked.stack import Stack


@dataclass(frozen=True)
class Told:
    """Of every step: the losses as (steps, clients), how many examples each was of, and the task where that differs."""

    losses: np.ndarray
    counts: np.ndarray
    tasks: list[str | None]


@dataclass(frozen=True)
class Outcome:
    """A client's training, or why it failed: how far its values moved, and where those are that it keeps to itself.

    `delta` is good until the next stack is trained.
    """

    trained: Trained | TrainingFailed
    delta: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


def make_outcomes(
    stack: Stack, members: Sequence[Member], told: Told, values: Sequence[Mapping[str, Tensor]]
) -> list[Outcome]:
    """In the members' order; `values` are those that they started from."""
    moved = stack.moved()
    slots = stack.slots() if stack.settings.keep_optimizer else []
    outcomes = []
    for k, member in enumerate(members):
        delta: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for number, block, row in stack.blocks_of(k):
            for name in block.places:
                like = values[k][name]
                delta[name] = block.part(moved[number], row, name, like)
                if is_personal(member.keys[name]):
                    after[name] = block.part(block.values, row, name, like).cpu().clone()
        tasks = _tasks(member, told, stack.settings)
        trained = _trained(k, told, tasks, stack.settings)
        if slots and isinstance(trained, Trained):
            named = _named(stack, slots, k, values[k])
            kept = close_kept(member.kept, named, member.keys, Counter(tasks), stack.settings.optimizer)
            trained = replace(trained, optimizer=kept)
        outcomes.append(Outcome(trained, delta, after))
    return outcomes


def _tasks(member: Member, told: Told, settings: LocalSettings) -> list[str]:
    """The task of each of a client's steps."""
    return [task or member.tasks[0].name for task in told.tasks[: num_steps(member.shards, settings)]]


def _trained(k: int, told: Told, tasks: Sequence[str], settings: LocalSettings) -> Trained | TrainingFailed:
    steps = len(tasks)
    losses, counts = told.losses[:steps, k], told.counts[:steps, k]
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        return divergence(tasks[bad[0]], float(losses[bad[0]]), int(bad[0]), settings)
    seen: dict[str, int] = {}
    means: dict[str, float] = {}
    for task in dict.fromkeys(tasks):
        own = np.asarray([name == task for name in tasks])
        seen[task] = int(counts[own].sum())
        means[task] = math.fsum(losses[own] * counts[own]) / seen[task]
    return Trained(means, steps, {}, seen)


def _named(stack: Stack, slots: Sequence[Sequence[Tensor]], k: int, values: Mapping[str, Tensor]) -> Named:
    """What the optimizer knows of a client's values, by slot and canonical name."""
    named: Named = {}
    for number, block, row in stack.blocks_of(k):
        for slot, buffer in zip(SLOTS[stack.settings.optimizer], slots[number], strict=False):
            for name in block.places.keys() & stack.trained:
                named.setdefault(slot, {})[name] = block.part(buffer, row, name, values[name]).clone()
    return named
