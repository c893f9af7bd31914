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
    """`windows` has for each task the texts that are read in several windows, and how many windows those have.

    `tokens` are those of all clients' examples. `quantiles` are those of a regression's scores over all clients, where
    the scores are at hand.
    """

    clients: Mapping[str, Mapping[str, Holding]]
    truncated: Mapping[str, int]
    tokens: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
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
    clients: dict[str, dict[str, Holding]] = {}
    tokens, texts, windows = Counter[str](), Counter[str](), Counter[str]()
    for client, shards in population.train.items():
        clients[client] = {}
        for name, shard in shards.items():
            clients[client][name] = Holding(len(shard), label_counts(tasks[name], shard.labels[shard.indices]))
            tokens[name] += shard.num_tokens()
            cut, parts = shard.num_windows()
            texts[name] += cut
            windows[name] += parts
    counts = {name: (texts[name], windows[name]) for name in tasks}
    return Census(clients, population.truncated, tokens, counts, _quantiles(population, tasks))


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
    tokens, texts, windows = Counter[str](), Counter[str](), Counter[str]()
    for hello in hellos.values():
        for name, holding in hello.tasks.items():
            truncated[name] += holding.truncated
            tokens[name] += holding.tokens
            texts[name] += holding.windowed
            windows[name] += holding.windows
    return Census(clients, truncated, tokens, {name: (texts[name], windows[name]) for name in tasks})


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
