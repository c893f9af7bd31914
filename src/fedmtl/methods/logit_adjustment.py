"""Logit adjustment (Menon et al.

2021, Long-Tail Learning via Logit Adjustment) against shares of labels that differ by client.

While a client trains, its outputs get the log of each label's share here over its share at all clients of the round.
What is trained then answers for the federation's shares, and a client is not moved by its shares being different. A
label counts once more than it occurs, so that one that is missing is not pushed away without end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import ClientId, ClientInfo, State
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup
from fedmtl.sharing.plan import HEADS, NO_EXTRA, Extra, SharingPlan
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import LocalClient, LocalMethod, LocalStep
from fedmtl.training.stacked.method import StackedMethod
from fedmtl.training.stacked.plan import Member
from fedmtl.training.stacked.stack import Stack

NAME = "logit_adjustment"
COUNTS = "label_counts"


class StackedLogits(StackedMethod):
    """The same for clients at once: a row of offsets for each client of a task."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._strength = float(options["strength"])
        self._offsets: dict[str, Tensor] = {}

    def allocate(self, stack: Stack) -> None:
        for task, rows in stack.shape.head_rows:
            bias = stack.leaf((f"{HEADS}{task}.bias",)).value
            self._offsets[task] = torch.zeros(
                rows.stop - rows.start, bias.shape[1], dtype=bias.dtype, device=bias.device
            )

    def load(self, stack: Stack, members: Sequence[Member]) -> None:
        for task, rows in stack.shape.head_rows:
            for row, member in zip(self._offsets[task], members[rows], strict=True):
                shard, counts = member.shards[task], member.received.get(NAME, NO_EXTRA).values.get(COUNTS, {})
                found = label_offsets(stack.tasks[task], shard.labels[shard.indices], counts, self._strength)
                row.copy_(torch.zeros(len(row)) if found is None else torch.from_numpy(found))

    def adjust(self, task: str, outputs: Tensor) -> Tensor:
        return outputs + self._offsets[task].unsqueeze(1)


class AdjustedLogits(LocalMethod):
    """Adds each task's offsets to the outputs that its loss is made of."""

    name = NAME
    stacked = StackedLogits

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._strength = float(options["strength"])
        self._offsets: dict[str, Tensor] = {}

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        tasks = client.bound.model.tasks
        for name, shard in client.shards.items():
            labels = shard.labels[shard.indices]
            found = label_offsets(tasks[name], labels, received.values.get(COUNTS, {}), self._strength)
            if found is not None:
                self._offsets[name] = torch.from_numpy(found).to(client.device)

    def adjust(self, step: LocalStep, outputs: Tensor) -> Tensor:
        offsets = self._offsets.get(step.task)
        return outputs if offsets is None else outputs + offsets.to(outputs.dtype)


def label_offsets(
    task: Task, labels: np.ndarray, counts: Mapping[str, Sequence[int]], strength: float
) -> np.ndarray | None:
    """What is added to a task's outputs at a client with these labels; `counts` are those of all clients, by task."""
    everybody = counts.get(task.name)
    return task.kind_of.label_offsets(task, labels, everybody, strength) if everybody else None


class LabelCounts(ServerMethod):
    """Sends how often each label occurs at the clients of the round together, by task."""

    name = NAME

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        labels: dict[str, list[int]] = {}
        for client, tasks in sampled.items():
            info = infos[client]
            for task in tasks:
                counts = zip_longest(labels.get(task, ()), info.label_counts.get(task, ()), fillvalue=0)
                labels[task] = [a + b for a, b in counts]
        return RoundSettings(extra=Extra({COUNTS: labels}))


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    # A client that trains alone does not know the labels of others.
    strength = 0.0 if config.mode == "local" else config.training.logit_adjustment
    return {"strength": strength} if strength else None


def _open(setup: ServerSetup) -> LabelCounts | None:
    if NAME not in setup.settings.methods:
        return None
    for name, task in setup.tasks.items():
        if task.kind_of.has_labels and type(task.kind_of).label_offsets is TaskKind.label_offsets:
            raise ConfigError(
                f"training.logit_adjustment: the outputs of {name} cannot be adjusted, it is {task.kind_of.words};"
                " remove it"
            )
    return LabelCounts()


def check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why what came with a job is no count of labels."""
    given = extra.values.get(COUNTS, {})
    is_fine = isinstance(given, dict) and all(
        task in tasks
        and isinstance(counts, list)
        and len(counts) <= len(tasks[task].labels)
        and all(type(count) is int and 0 <= count < 1 << 53 for count in counts)
        for task, counts in given.items()
    )
    is_alone = set(extra.values) <= {COUNTS} and not extra.tensors
    return None if is_fine and is_alone else "the job's label_counts are not counts of labels"


CAPABILITY = Capability(NAME, AdjustedLogits, _client_options, _open, check_received=check_received)
