"""What came of training a stack, client by client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedmtl.sharing.plan import is_personal
from fedmtl.training.local import Trained, TrainingFailed, divergence, num_steps, returned_tasks
from fedmtl.training.local_method import LocalSettings
from fedmtl.training.optimizer import SLOTS
from fedmtl.training.stacked.plan import Member, Named, advance_state
from fedmtl.training.stacked.stack import Stack


@dataclass(frozen=True)
class StepRecords:
    """The losses of all steps as (steps, clients), their numbers of examples, and the tasks where those differ."""

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
    stack: Stack, members: Sequence[Member], records: StepRecords, weights: Sequence[Mapping[str, Tensor]]
) -> list[Outcome]:
    """Return the clients' outcomes in the members' order; `weights` are those that they started from."""
    moved = stack.moved()
    slots = stack.slots() if stack.settings.keep_optimizer else []
    outcomes = []
    for k, member in enumerate(members):
        delta: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for number, block, row in stack.blocks_of(k):
            for name in block.spans:
                like = weights[k][name]
                delta[name] = block.part(moved[number], row, name, like)
                if is_personal(member.keys[name]):
                    after[name] = block.part(block.values, row, name, like).cpu().clone()
        tasks = _tasks(member, records, stack.settings)
        trained = _trained(k, member, records, tasks, stack.settings)
        if slots and isinstance(trained, Trained):
            named = _named(stack, slots, k, weights[k])
            state = advance_state(member.optimizer, named, member.keys, Counter(tasks), stack.settings.optimizer)
            trained = replace(trained, optimizer=state)
        if isinstance(trained, Trained):
            sent = {method.name: method.finish(member, trained.tasks) for method in stack.methods}
            trained = replace(trained, sent={name: extra for name, extra in sent.items() if extra})
        outcomes.append(Outcome(trained, delta, after))
    return outcomes


def _tasks(member: Member, records: StepRecords, settings: LocalSettings) -> list[str]:
    """Return the task of each of a client's steps."""
    return [task or member.tasks[0].name for task in records.tasks[: num_steps(member.shards, settings)]]


def _trained(
    k: int, member: Member, records: StepRecords, tasks: Sequence[str], settings: LocalSettings
) -> Trained | TrainingFailed:
    """Sum up a client's steps, whose tasks are `tasks`."""
    steps = len(tasks)
    losses, counts = records.losses[:steps, k], records.counts[:steps, k]
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        return divergence(tasks[bad[0]], float(losses[bad[0]]), int(bad[0]), settings)
    seen: dict[str, int] = {}
    means: dict[str, float] = {}
    for task in dict.fromkeys(tasks):
        is_of_task = np.asarray([name == task for name in tasks])
        number = int(counts[is_of_task].sum())
        seen[task] = number if member.lots is None else member.lots.seen[task]
        if number:
            means[task] = math.fsum(losses[is_of_task] * counts[is_of_task]) / number
    return Trained(means, steps, {}, seen, returned_tasks(list(member.shards), settings, seen))


def _named(stack: Stack, slots: Sequence[Sequence[Tensor]], k: int, weights: Mapping[str, Tensor]) -> Named:
    """Return the optimizer's state of a client's values, by slot and canonical name."""
    named: Named = {}
    for number, block, row in stack.blocks_of(k):
        for slot, buffer in zip(SLOTS[stack.settings.optimizer], slots[number], strict=False):
            for name in block.spans.keys() & stack.trained:
                named.setdefault(slot, {})[name] = block.part(buffer, row, name, weights[name]).clone()
    return named
