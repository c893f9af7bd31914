"""The tasks of a run whose examples are on other machines: what the server can load, and what it only knows of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedmtl.capabilities import task_kind
from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.experiment.population import Population
from fedmtl.tasks.batches import Shard, Shards
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.examples import no_examples
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.resolve import known_task
from fedmtl.tasks.task import active_tasks, task_clients
from fedmtl.tasks.tokens import token_cache, tokenize

AT_SITES = "at the sites"


def check_deployable(config: Config) -> None:
    if config.mode.startswith("centralized"):
        raise ConfigError(f"mode: found {config.mode}, for which all text has to be in one place; use `fedmtl run`")
    for name, task in config.tasks.items():
        if task.head == "pretrained":
            raise ConfigError(
                f"tasks.{name}.head: found pretrained, for which a site would have to open the server's folder; run one"
                " round with `fedmtl run`, and start from its model (model.start_from)"
            )


def server_config(config: Config) -> Config:
    """The config with evaluation at the sites where the server has no examples of a task."""
    missing = [name for name in config.tasks if _has_no_source(config, name)]
    if not missing or config.evaluation.where == "clients":
        return config
    if config.evaluation.where == "server":
        raise ConfigError(
            f"evaluation.where: found server, which has no examples of {missing[0]};"
            f" write `clients`, or tasks.{missing[0]}.source"
        )
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"where": "clients"})})


def server_data(config: Config) -> dict[str, TaskData]:
    """Every task; those the server scores come with their validation examples, and no training ones."""
    loaded = [
        name
        for name in config.tasks
        if not _has_no_source(config, name)
        and (config.evaluation.where != "clients" or not _names_labels(config, name))
    ]
    found = {}
    if loaded:
        tasks = {name: config.tasks[name] for name in loaded}
        found = load_tasks(config.model_copy(update={"tasks": tasks, "clients": {}}))
    data = {}
    for name in config.tasks:
        if name in found:
            data[name] = replace(found[name], train=no_examples(found[name].task))
        else:
            task = known_task(config, name)
            data[name] = TaskData(task, no_examples(task), no_examples(task), {}, {}, AT_SITES, False, False)
    return data


def server_population(config: Config, data: Mapping[str, TaskData], tokenizer: Any) -> Population:
    """The server's validation examples; the clients' are elsewhere."""
    cache = token_cache(config.data)
    shared = {}
    for part in data.values():
        for each, examples in part.validation_sets().items() if len(part.validation) else ():
            folder, _ = tokenize(part.task, examples.texts, tokenizer, config.model.max_length, cache)
            shared[each] = Shard(folder, examples.labels, np.arange(len(examples), dtype=np.int64))
    return Population(Shards({}, {}, {}), {}, shared, {})


def configured_tasks(config: Config) -> dict[str, tuple[str, ...]]:
    """Return client -> its tasks by the config alone, with the clients that it names or that are made from it."""
    tasks_of: dict[str, tuple[str, ...]] = {}
    for task, clients in task_clients(config).items():
        for client in clients:
            tasks_of[client] = (*tasks_of.get(client, ()), task)
    return tasks_of


def scheduled_tasks(config: Config, client: str, brought: Sequence[str], round_number: int) -> tuple[str, ...]:
    """What a site trains in a round: what it brought, as far as the config does not say otherwise for that round."""
    configured = configured_tasks(config).get(client, ())
    due = active_tasks(config, client, round_number) if configured else ()
    return tuple(
        name
        for name, task in config.tasks.items()
        if name in brought
        and task.from_round <= round_number
        and (task.until_round is None or round_number <= task.until_round)
        and (name in due or name not in configured)
    )


def _has_no_source(config: Config, name: str) -> bool:
    return config.tasks[name].source is None and name not in BUILTIN


def _names_labels(config: Config, name: str) -> bool:
    task = config.tasks[name]
    builtin = BUILTIN.get(name)
    needs_none = task.kind is not None and not task_kind(task.kind, f"tasks.{name}.kind").has_labels
    return bool(task.labels or needs_none or (builtin and (builtin.labels or builtin.score_range)))
