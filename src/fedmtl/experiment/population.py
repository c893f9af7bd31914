"""From tasks to clients: tokenize, deal the examples, and note what each client has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.config import Config
from fedmtl.experiment.modes import mode_clients
from fedmtl.federation.messages import ClientInfo
from fedmtl.model.vocabulary import used_rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.partition import partition
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import default_cache, tokenize

Shards = dict[str, dict[str, Shard]]


@dataclass(frozen=True)
class Population:
    """The clients' shards by client and task, the server's validation, and how many texts were cut."""

    train: Shards
    validation: Shards
    shared_validation: dict[str, Shard]
    truncated: dict[str, int]


def build_population(config: Config, data: Mapping[str, TaskData], tokenizer: Any) -> Population:
    cache = Path(config.data.cache) if config.data.cache else default_cache()

    def shard(task: Task, examples: Examples) -> tuple[Shard, int]:
        folder, truncated = tokenize(task, examples.texts, tokenizer, config.model.max_length, cache)
        return Shard(folder, examples.labels, np.arange(len(examples), dtype=np.int64)), truncated

    train: Shards = {}
    validation: Shards = {}
    shared: dict[str, Shard] = {}
    cut: dict[str, int] = {}
    for name, clients in mode_clients(config).items():
        part = data[name]
        shared[name], _ = shard(part.task, part.validation)
        cut[name] = 0
        for client, examples in part.client_train.items():
            train.setdefault(client, {})[name], truncated = shard(part.task, examples)
            validation.setdefault(client, {})[name], _ = shard(part.task, part.client_validation[client])
            cut[name] += truncated
        dealt = [client for client in clients if client not in part.client_train]
        if dealt:
            whole, truncated = shard(part.task, part.train)
            cut[name] += truncated
            for client, indices in _deal(config, part, dealt).items():
                train.setdefault(client, {})[name] = Shard(whole.tokens, whole.labels, indices)
    return Population(train, validation, shared, cut)


def client_infos(population: Population, pad_id: int, *, evaluated: bool) -> dict[str, ClientInfo]:
    """What the server may know of each client; evaluation rows only where clients evaluate."""
    infos: dict[str, ClientInfo] = {}
    shared = [ids for shard in population.shared_validation.values() for ids in shard.used_ids()] if evaluated else []
    for client, shards in population.train.items():
        own = [ids for shard in population.validation.get(client, {}).values() for ids in shard.used_ids()]
        infos[client] = ClientInfo(
            {task: len(shard) for task, shard in shards.items()},
            used_rows((ids for shard in shards.values() for ids in shard.used_ids()), pad_id),
            used_rows([*shared, *own], pad_id) if evaluated else None,
            {task: shard.num_tokens() for task, shard in shards.items()},
        )
    return infos


def _deal(config: Config, part: TaskData, clients: list[str]) -> dict[str, np.ndarray]:
    return partition(
        part.train.labels,
        part.train.column,
        clients,
        config.partition,
        seed=config.seed,
        task=part.task.name,
        regression=part.task.is_regression,
    )
