"""The baselines: the same data, budget and loop, with other clients or another plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedmtl.capabilities import client_methods
from fedmtl.config import Config, FederationConfig
from fedmtl.federation.messages import Codecs
from fedmtl.sharing.plan import SharingPlan
from fedmtl.tasks.examples import join_examples
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.membership import active_tasks, task_clients
from fedmtl.tasks.task import Task
from fedmtl.training.settings import LocalSettings, local_settings

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
    return config.federation.model_copy(update={"aggregation": "mean", "max_share": None})


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
