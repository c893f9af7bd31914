"""Who has what: examples and labels by client and task, counted here or reported by the sites of a deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedmtl.experiment.population import Population
from fedmtl.federation.handshake import Hello
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
        return sum(holdings[task].examples for holdings in self.clients.values() if task in holdings)

    def labels(self, task: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for holdings in self.clients.values():
            total.update(holdings[task].labels if task in holdings else {})
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


def reported_census(hellos: Mapping[str, Hello], tasks: Mapping[str, Task]) -> Census:
    """Take the census from the sites' hellos; label counts are in the task's order, empty where a site sends none."""
    clients = {
        client: {
            name: Holding(
                holding.examples, dict(zip(tasks[name].kind_of.count_names(tasks[name]), holding.labels, strict=False))
            )
            for name, holding in hello.tasks.items()
        }
        for client, hello in hellos.items()
    }
    truncated = Counter(dict.fromkeys(tasks, 0))
    for hello in hellos.values():
        truncated.update({name: holding.truncated for name, holding in hello.tasks.items()})
    return Census(clients, truncated)


def label_counts(task: Task, labels: np.ndarray) -> dict[str, int]:
    """Examples per label, or per range of scores."""
    return dict(zip(task.kind_of.count_names(task), task.kind_of.counts(task, labels), strict=True))


def _quantiles(population: Population, tasks: Mapping[str, Task]) -> dict[str, list[float]]:
    train = population.train
    found = {}
    for name, task in tasks.items():
        if not task.kind_of.has_labels:
            shards = [train[client][name] for client in train if name in train.tasks_of(client)]
            labels = np.concatenate([shard.labels[shard.indices] for shard in shards])
            found[name] = task.kind_of.quantiles(task, labels)
    return found
