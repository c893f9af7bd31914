"""From tasks to clients: tokenize, deal the examples, and note what each client has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedmtl.config import Config
from fedmtl.experiment.modes import mode_clients
from fedmtl.federation.messages import ClientInfo
from fedmtl.methods.distillation import Teacher
from fedmtl.sharing.vocabulary import Rows, used_rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.partition import partition
from fedmtl.tasks.shards import Dealt, Shards, deal, tasks_by_client
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import token_cache, tokenize

# Infos in memory at once; a client's rows take some 20 kB.
MOST_INFOS = 256


@dataclass(frozen=True)
class Population:
    """The clients' shards by client and task, the server's validation, and how many texts were cut."""

    train: Shards
    validation: dict[str, dict[str, Shard]]
    shared_validation: dict[str, Shard]
    truncated: dict[str, int]


class ClientInfos(Mapping[str, ClientInfo]):
    """What the server may know of each client, computed on first access; evaluation rows only where wanted."""

    def __init__(self, population: Population, pad_id: int, *, evaluated: bool) -> None:
        self._population, self._pad_id, self._evaluated = population, pad_id, evaluated
        shared = population.shared_validation.values() if evaluated else ()
        self._shared_rows = used_rows((ids for shard in shared for ids in shard.used_ids()), pad_id)
        self._info = lru_cache(maxsize=MOST_INFOS)(self._find)

    def __getitem__(self, client: str) -> ClientInfo:
        return self._info(client)

    def __iter__(self) -> Iterator[str]:
        return iter(self._population.train)

    def __len__(self) -> int:
        return len(self._population.train)

    def _find(self, client: str) -> ClientInfo:
        shards = self._population.train[client]
        # Which part of a client's file is for training the server's seed decides: rows of that part alone would
        # tell the words of single examples, seed by seed. Dealt examples have no validation part.
        parts = [*shards.values(), *self._population.validation.get(client, {}).values()]
        rows = used_rows((ids for shard in parts for ids in shard.used_ids()), self._pad_id)
        return ClientInfo(
            {task: len(shard) for task, shard in shards.items()},
            rows,
            self._evaluation_rows(client, rows),
            {task: shard.num_tokens() for task, shard in shards.items()},
            {task: _label_counts(shard) for task, shard in shards.items()},
            {task: len(self._validation_shard(client, task)) for task in shards},
        )

    def _validation_shard(self, client: str, task: str) -> Shard:
        shards = self._population.validation.get(client, {})
        return shards[task] if task in shards else self._population.shared_validation[task]

    def _evaluation_rows(self, client: str, rows: Rows) -> Rows | None:
        if not self._evaluated:
            return None
        has_validation = bool(self._population.validation.get(client))
        return used_rows([self._shared_rows, rows], self._pad_id) if has_validation else self._shared_rows


def _label_counts(shard: Shard) -> list[int]:
    """How often each label occurs; empty where the labels are scores."""
    is_label = np.issubdtype(shard.labels.dtype, np.integer)
    return [int(count) for count in np.bincount(shard.labels[shard.indices])] if is_label else []


def build_population(
    config: Config, data: Mapping[str, TaskData], tokenizer: Any, teacher: Teacher | None = None
) -> Population:
    """Tokenize all texts, compute the teacher's outputs for training examples, and deal these to the clients."""
    cache = token_cache(config.data)

    def shard(task: Task, examples: Examples) -> tuple[Shard, int]:
        folder, truncated = tokenize(task, examples.texts, tokenizer, config.model.max_length, cache)
        return Shard(folder, examples.labels, np.arange(len(examples), dtype=np.int64)), truncated

    def training_shard(task: Task, examples: Examples) -> tuple[Shard, int]:
        whole, truncated = shard(task, examples)
        return replace(whole, teacher=teacher.outputs(task, examples.texts) if teacher else None), truncated

    from_files: dict[str, dict[str, Shard]] = {}
    dealt: dict[str, Dealt] = {}
    validation: dict[str, dict[str, Shard]] = {}
    shared: dict[str, Shard] = {}
    cut: dict[str, int] = {}
    holders: dict[str, list[str]] = {}
    for name, clients in mode_clients(config).items():
        part = data[name]
        shared[name], _ = shard(part.task, part.validation)
        cut[name] = 0
        for client, examples in part.client_train.items():
            from_files.setdefault(client, {})[name], truncated = training_shard(part.task, examples)
            validation.setdefault(client, {})[name], _ = shard(part.task, part.client_validation[client])
            cut[name] += truncated
        others = [client for client in clients if client not in part.client_train]
        if others:
            whole, truncated = training_shard(part.task, part.train)
            cut[name] += truncated
            dealt[name] = deal(whole.tokens, whole.labels, _partition(config, part, others), whole.teacher)
        holders[name] = [*part.client_train, *others]
    return Population(Shards(tasks_by_client(holders), from_files, dealt), validation, shared, cut)


def _partition(config: Config, part: TaskData, clients: list[str]) -> dict[str, np.ndarray]:
    return partition(
        part.train.labels,
        part.train.column,
        clients,
        config.partition,
        seed=config.seed,
        task=part.task.name,
        kind=part.task.kind_of,
    )
