"""What the server checks before an answer may count: of a training job an update, of an evaluation job sums."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedmtl.capabilities import find
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, Update
from fedmtl.sharing.plan import HEADS, Key, Rows, SharingPlan, owner_task, scope_tasks
from fedmtl.tasks.metrics import Sums, score, sums_from_dict
from fedmtl.tasks.task import Task
from fedmtl.timing import timed

# No training moves a tensor this far, and the square of a longer delta is infinite in 32 bits: it would end the run
# of everybody in the server optimizer.
LONGEST_NORM = 1e9


@dataclass(frozen=True)
class Expected:
    """What a job allows in its answer; small, so that the server need not keep the job.

    `examples` is how many examples of each task the client is known to have; a client counts for no more.
    """

    client: str
    round: int
    tasks: tuple[str, ...]
    plan: SharingPlan
    tensors: Mapping[Key, tuple[torch.Size, torch.dtype]]
    rows: Rows | None
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    shares_pairs: bool = False


def expect(job: Job, info: ClientInfo | None = None) -> Expected:
    """What the answer to a job may hold, of a client of which `info` is known; without it counts are not bounded."""
    tensors = {key: (tensor.shape, tensor.dtype) for key, tensor in job.weights.items() if job.plan.trains(key)}
    methods = job.settings.get("methods", {})
    known = {} if info is None else info.num_examples if job.kind == "train" else info.num_validation
    pairs = bool(job.settings.get("share_pairs", False))
    examples = {task: known[task] for task in job.tasks if task in known}
    if info is not None and job.kind == "train":
        examples = {task: known.get(task, 0) for task in job.tasks}
    return Expected(job.client, job.round, job.tasks, job.plan, tensors, job.rows, methods, examples, pairs)


def unwelcome(answer: Update | Failure, expected: Container[ClientId], answered: Container[ClientId]) -> str | None:
    """Why an answer is not even looked at: it is a failure, of a client without a job, or a second one."""
    if isinstance(answer, Failure):
        return answer.reason
    if answer.client not in expected:
        return "answered without a job"
    return "answered twice" if answer.client in answered else None


@timed("checking")
def refusal(update: Update, expected: Expected, max_norm: float | None = None) -> str | None:
    """Why the update must not count, or None if it may."""
    reason = _refused_header(update, expected)
    if reason is not None:
        return reason
    if update.sums:
        return "returned scores for a training job"
    unknown = [task for task in update.tasks if expected.examples.get(task) == 0]
    if unknown:
        return f"trained {unknown[0]}, of which it declared no examples"
    if not set(update.seen) <= set(update.tasks):
        return "it trained on tasks that it does not return"
    if not _are_equal(update.rows, expected.rows):
        return "its token rows are not those it was sent"
    return _refused_extra(update, expected) or _refused_tensor(update, expected, max_norm)


def counted_examples(update: Update, expected: Expected) -> dict[str, int]:
    """How many examples of each task the update counts for: what it claims, at most what it is known to have."""
    return {task: min(count, expected.examples.get(task, count)) for task, count in update.num_examples.items()}


def read_scores(answer: Update, expected: Expected, tasks: Mapping[str, Task]) -> dict[str, Sums] | str:
    """The sums of every task of an evaluation's answer, or why none of it may count."""
    reason = _refused_header(answer, expected)
    if reason is not None:
        return reason
    if set(answer.tasks) != set(expected.tasks) or set(answer.sums) != set(expected.tasks):
        return f"scored {', '.join(map(repr, answer.sums)) or 'nothing'}; it was given {', '.join(expected.tasks)}"
    if answer.delta or answer.losses or answer.seen or answer.extra:
        return "returned what only training returns"
    found = {}
    for name in expected.tasks:
        sums = sums_from_dict(tasks[name], answer.sums[name], with_pairs=expected.shares_pairs)
        most = expected.examples.get(name)
        if sums.examples != answer.num_examples[name] or (most is not None and sums.examples > most):
            return f"scored {sums.examples} examples of {name}; it claims {answer.num_examples[name]} and has {most}"
        # What cannot be scored alone cannot be scored with others.
        score(tasks[name], sums)
        found[name] = sums
    return found


def _refused_header(answer: Update, expected: Expected) -> str | None:
    if answer.client != expected.client:
        return f"answered as {answer.client}"
    if answer.round != expected.round:
        return f"is for round {answer.round}; round {expected.round} is open"
    if not answer.tasks or not set(answer.tasks) <= set(expected.tasks) or len(set(answer.tasks)) < len(answer.tasks):
        return f"claims the tasks {', '.join(answer.tasks)}; it was given {', '.join(expected.tasks)}"
    if set(answer.num_examples) != set(answer.tasks) or any(n < 1 for n in answer.num_examples.values()):
        return "its example counts do not fit its tasks"
    return None


def _are_equal(rows: Rows | None, expected: Rows | None) -> bool:
    if rows is None or expected is None:
        return rows is expected
    return np.array_equal(rows, expected)


def _refused_extra(update: Update, expected: Expected) -> str | None:
    """Why what capabilities sent must not count: it has no part in the job, is not finite, or fails their check."""
    for name, extra in update.extra.items():
        if name not in expected.methods:
            return f"it sent something of {name}, which has no part in its job"
        for slot, values in extra.tensors.items():
            for key, value in values.items():
                if key not in expected.tensors or not _serves(key, update.tasks, expected.plan):
                    return f"it sent {name}.{slot} of {_worded(key)}, which is not its own"
                shape, _ = expected.tensors[key]
                if value.shape != shape or not value.is_floating_point():
                    return f"{name}.{slot}: {key.name} is {tuple(value.shape)}; {tuple(shape)} was sent"
                if not math.isfinite(norm := float(torch.linalg.vector_norm(value))) or norm > LONGEST_NORM:
                    return f"{name}.{slot}: {key.name} holds values that are not numbers"
        try:
            reason = find(name).check_sent(extra, update.tasks, expected.methods[name])
        except Exception as error:
            # A capability need not be prepared for whatever a client may send.
            reason = f"what it sent of {name} cannot be read: {type(error).__name__}"
        if reason is not None:
            return reason
    return None


def _refused_tensor(update: Update, expected: Expected, max_norm: float | None) -> str | None:
    square = 0.0
    for key, delta in update.delta.items():
        if key not in expected.tensors:
            return f"returned {_worded(key)}, which it was not sent"
        if not _serves(key, update.tasks, expected.plan):
            return f"returned {_worded(key)}, which is of none of its tasks, {', '.join(update.tasks)}"
        shape, dtype = expected.tensors[key]
        if delta.shape != shape or delta.dtype != dtype:
            return f"{key.name} is {delta.dtype} {tuple(delta.shape)}; {dtype} {tuple(shape)} was sent"
        norm = float(torch.linalg.vector_norm(delta))
        if not math.isfinite(norm):
            return f"{key.name} holds values that are not numbers"
        if norm > LONGEST_NORM:
            return f"{key.name} has the norm {norm:.3g}; no training moves a value that far"
        square += norm * norm
    if max_norm is not None and math.sqrt(square) > max_norm:
        return f"its norm {math.sqrt(square):.3g} is over federation.max_update_norm {max_norm:g}"
    for key in expected.tensors:
        if key not in update.delta and _serves(key, update.tasks, expected.plan):
            return f"did not return {_worded(key)}"
    return None


def _serves(key: Key, tasks: Sequence[str], plan: SharingPlan) -> bool:
    """Whether a value is used by one of these tasks, so that their examples count for it."""
    owner = owner_task(key.name)
    return owner in tasks if owner is not None else bool(scope_tasks(plan, key.scope, tasks))


def _worded(key: Key) -> str:
    is_head = key.name.startswith(HEADS)
    return f"the head of {owner_task(key.name)}" if is_head else f"{key.name} of scope {key.scope}"
