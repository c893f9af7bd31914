"""What rules share that compare clients: they compare clients of the same task only.

Updates of different tasks differ because the tasks do, and a rule that compares them takes one task for an attack on
the other. So a scope that several tasks share is combined task by task, and the tasks' results are averaged by how much
their clients count; a client with several tasks is compared in each of them, and its weight is split between them by
its examples.

Where a task has fewer than three clients in a scope, nobody can tell which of them is right. Their updates are clipped
to the median norm of the scope's clients, which bounds what they do to other tasks, and averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedmtl.federation.aggregators.clipped_mean import clip_factor, lower_median, scope_norms
from fedmtl.federation.messages import Update

# Of two updates that differ, nobody can say which is wrong.
FEWEST = 3
# Honest updates of one task may be longer than those of another, by more examples or another loss: by less than this.
SLACK = 2.0


@dataclass(frozen=True)
class TaskClients:
    """The clients of one task in a scope: their positions among the updates, and how much each counts for the task."""

    members: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def weight(self) -> float:
        return sum(self.weights)

    @property
    def is_comparable(self) -> bool:
        """Whether there are enough of them for a rule to tell a wrong one."""
        return len(self.members) >= FEWEST


def clients_by_task(updates: Sequence[Update], weights: Sequence[float], scope: str) -> list[TaskClients]:
    """The clients of every task in a scope, given all updates that bring something of it and what each counts there."""
    members: dict[str, dict[int, float]] = {}
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        kind, _, owner = scope.partition(":")
        tasks = [owner] if kind == "task" else list(update.tasks)
        examples = [update.num_examples.get(task, 0) for task in tasks]
        for task, count in zip(tasks, examples, strict=True):
            share = count / sum(examples) if sum(examples) else 1 / len(tasks)
            members.setdefault(task, {})[number] = weight * share
    found = (TaskClients(tuple(of_task), tuple(of_task.values())) for _, of_task in sorted(members.items()))
    return [clients for clients in found if clients.weight > 0]


def factors_to_median(updates: Sequence[Update]) -> list[dict[str, float]]:
    """By update and scope, what clips it to the lower median norm of the scope."""
    norms = [scope_norms(update.delta) for update in updates]
    by_scope: dict[str, list[float]] = {}
    for of_update in norms:
        for scope, norm in of_update.items():
            by_scope.setdefault(scope, []).append(norm)
    bounds = {scope: SLACK * lower_median(found) for scope, found in by_scope.items()}
    return [
        {scope: clip_factor(norm, bounds[scope] or None) for scope, norm in of_update.items()} for of_update in norms
    ]
