"""Who takes part in a run: what its mode makes of clients, data and settings, and what each client has.

The baselines are the same data, budget and loop with other clients or another plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedmtl.capabilities import client_methods
from fedmtl.config import AggregationConfig, Config, FederationConfig
from fedmtl.federation.messages import ClientInfo, Codecs
from fedmtl.methods.distillation import Teacher
from fedmtl.sharing.plan import Rows, SharingPlan, used_rows
from fedmtl.tasks.batches import Dealt, Shard, Shards, deal, tasks_by_client
from fedmtl.tasks.examples import Examples, join_examples
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.partition import partition
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task, active_tasks, task_clients
from fedmtl.tasks.tokens import token_cache, tokenize
from fedmtl.training.local_method import LocalSettings, local_settings

# Infos in memory at once; a client's rows take some 20 kB.
MOST_INFOS = 256


@dataclass(frozen=True)
class Population:
    """The clients' shards by client and task, the server's validation by set, and how many texts were cut.

    A set is a task's name, or TASK:NAME of a further one (`TaskData.validation_sets`).
    """

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
    """How often each label occurs; empty where the labels are scores, or where an example may have several."""
    labels = shard.labels[shard.indices]
    if isinstance(labels, Sequences) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        return []
    return [int(count) for count in np.bincount(labels)]


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
        shared |= {each: shard(part.task, examples)[0] for each, examples in part.validation_sets().items()}
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


CENTRAL = "central"


def mode_clients(config: Config) -> dict[str, list[str]]:
    """For each task, the clients its examples are dealt to."""
    if config.mode == "centralized":
        return {task: [CENTRAL] for task in config.tasks}
    if config.mode == "centralized_single_task":
        return {task: [f"{CENTRAL}_{task}"] for task in config.tasks}
    return task_clients(config)


def mode_active_tasks(config: Config, client: str, round_number: int) -> tuple[str, ...]:
    """The tasks that a client trains in a round; a central client trains those that any client would train then."""
    if not config.mode.startswith("centralized"):
        return active_tasks(config, client, round_number)
    owned = [task for task, holders in mode_clients(config).items() if client in holders]
    everybody = {name for names in task_clients(config).values() for name in names}
    somebody = {task for name in everybody for task in active_tasks(config, name, round_number)}
    return tuple(task for task in owned if task in somebody)


def mode_data(config: Config, data: Mapping[str, TaskData]) -> dict[str, TaskData]:
    """The examples; a centralized mode joins them all, also those of clients that read separate files."""
    if not config.mode.startswith("centralized"):
        return dict(data)
    return {
        name: replace(
            part,
            train=join_examples(part.task, [part.train, *part.client_train.values()]),
            client_train={},
            client_validation={},
        )
        for name, part in data.items()
    }


def mode_codecs(config: Config) -> Codecs:
    """How tensors travel; a central client stands for data on one machine, to which nothing travels."""
    if config.mode.startswith("centralized"):
        return Codecs()
    wire = config.wire
    return Codecs(wire.down, wire.up, wire.topk_share, wire.error_feedback)


def mode_federation(config: Config) -> FederationConfig:
    """How updates are combined; a baseline takes the plain mean, without a bound on a client's share."""
    if config.mode.startswith("federated"):
        return config.federation
    plain = AggregationConfig(average=config.federation.average)
    return config.federation.model_copy(update={"aggregation": plain})


def client_settings(
    config: Config, tasks: Mapping[str, Task], plan: SharingPlan, names: Sequence[str]
) -> LocalSettings:
    """The settings that clients get for training; a deployed site derives the same from the server's config."""
    return local_settings(
        config.training,
        {name: task.learning_rate for name, task in tasks.items()},
        {name: task.weight for name, task in tasks.items()},
        keep_optimizer=keeps_optimizer(config),
        batch_sizes={name: task.batch_size for name, task in tasks.items()},
        methods=client_methods(config, plan, names),
    )


def keeps_optimizer(config: Config) -> bool:
    """Whether clients keep their optimizer's state between rounds: by default where nothing is averaged, to be fair."""
    if config.training.keep_optimizer is not None:
        return config.training.keep_optimizer
    return config.mode.startswith("centralized") or config.mode == "local"
