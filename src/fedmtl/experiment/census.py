"""Who has what: examples and labels by client and task, counted here or told by sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fedmtl.experiment.population import Population
from fedmtl.federation.handshake import SCORE_RANGES, Hello
from fedmtl.tasks.task import Task


@dataclass(frozen=True)
class Holding:
    """What a client has of one task."""

    examples: int
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Census:
    """`quantiles` are those of a regression's scores over all clients, where the scores are at hand."""

    clients: Mapping[str, Mapping[str, Holding]]
    truncated: Mapping[str, int]
    quantiles: Mapping[str, list[float]] = field(default_factory=dict)

    def examples(self, task: str) -> int:
        return sum(held[task].examples for held in self.clients.values() if task in held)

    def labels(self, task: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for held in self.clients.values():
            total.update(held[task].labels if task in held else {})
        return dict(total)


def take_census(population: Population, tasks: Mapping[str, Task]) -> Census:
    """Count what the clients on this machine have."""
    clients = {
        client: {
            name: Holding(len(shard), label_counts(tasks[name], shard.labels[shard.indices]))
            for name, shard in shards.items()
        }
        for client, shards in population.train.items()
    }
    return Census(clients, population.truncated, _quantiles(population, tasks))


def told_census(hellos: Mapping[str, Hello], tasks: Mapping[str, Task]) -> Census:
    """What sites said they have; their counts of labels are in the task's order, and none where one tells none."""
    clients = {
        client: {
            name: Holding(held.examples, dict(zip(label_names(tasks[name]), held.labels, strict=False)))
            for name, held in hello.tasks.items()
        }
        for client, hello in hellos.items()
    }
    truncated = Counter(dict.fromkeys(tasks, 0))
    for hello in hellos.values():
        truncated.update({name: held.truncated for name, held in hello.tasks.items()})
    return Census(clients, truncated)


def label_counts(task: Task, labels: np.ndarray) -> dict[str, int]:
    """Examples per label, or per range of scores."""
    return dict(zip(label_names(task), counts_in_order(task, labels), strict=True))


def counts_in_order(task: Task, labels: np.ndarray) -> list[int]:
    """How many examples each label has in the task's order, or each range of scores from the lowest."""
    if not task.is_regression:
        return [int(count) for count in np.bincount(labels, minlength=len(task.labels))]
    counts, _ = np.histogram(labels, bins=np.linspace(0.0, 1.0, SCORE_RANGES + 1))
    return [int(count) for count in counts]


def label_names(task: Task) -> list[str]:
    """The labels in order, or the ranges of scores in words."""
    if not task.is_regression:
        return list(task.labels)
    low, high = task.score_range
    edges = np.linspace(0.0, 1.0, SCORE_RANGES + 1)
    return [f"{low + (high - low) * a:.1f}-{low + (high - low) * b:.1f}" for a, b in pairwise(edges)]


def _quantiles(population: Population, tasks: Mapping[str, Task]) -> dict[str, list[float]]:
    train = population.train
    found = {}
    for name, task in tasks.items():
        if task.is_regression:
            shards = [train[client][name] for client in train if name in train.tasks_of(client)]
            labels = np.concatenate([shard.labels[shard.indices] for shard in shards])
            low, high = task.score_range
            found[name] = [
                round(low + (high - low) * float(q), 4) for q in np.quantile(labels, [0, 0.25, 0.5, 0.75, 1])
            ]
    return found
