"""Which clients hold which tasks, and in which rounds they train them."""

from __future__ import annotations

from fedmtl.config import ClientConfig, Config, SourceConfig, TaskConfig
from fedmtl.errors import ConfigError


def task_clients(config: Config) -> dict[str, list[str]]:
    """For each task, in config order, the clients that hold it in any round; each task has at least one."""
    if not config.clients:
        return {name: _made_clients(name, config.federation.clients_per_task) for name in config.tasks}
    trained = {name: client.tasks_of_all_rounds for name, client in config.clients.items()}
    holders = {task: [name for name, tasks in trained.items() if task in tasks] for task in config.tasks}
    for name, clients in holders.items():
        if not clients:
            raise ConfigError(
                f"tasks.{name}: no client holds it; add `{name}` to the tasks of a client under `clients`, "
                "or remove the task"
            )
    return holders


def client_sources(config: Config, task: str) -> dict[str, SourceConfig]:
    """The clients that bring files for a task, with those files."""
    sources = {name: client.source[task] for name, client in config.clients.items() if task in client.source}
    return {
        name: SourceConfig.model_validate({"train": source}) if isinstance(source, str) else source
        for name, source in sources.items()
    }


def active_tasks(config: Config, client: str, round: int) -> tuple[str, ...]:
    """The tasks a client trains in a round (the first is 1), in config order; none when it sits out.

    An entry of `tasks_from_round` replaces what the client trained before it.
    """
    if config.clients:
        tasks = _trained(config.clients[client], round)
    else:
        tasks = {client.rpartition("_client")[0]}
        assert tasks <= config.tasks.keys(), f"{client} is no client of this config"
    return tuple(name for name, task in config.tasks.items() if name in tasks and _covers(task, round))


def _made_clients(task: str, num_clients: int) -> list[str]:
    if num_clients == 1:
        return [f"{task}_client"]
    width = len(str(num_clients))
    return [f"{task}_client_{number:0{width}}" for number in range(1, num_clients + 1)]


def _trained(client: ClientConfig, round: int) -> set[str]:
    if not _covers(client, round):
        return set()
    begun = [start for start in client.tasks_from_round if start <= round]
    return set(client.tasks_from_round[max(begun)] if begun else client.tasks)


def _covers(span: TaskConfig | ClientConfig, round: int) -> bool:
    return span.from_round <= round and (span.until_round is None or round <= span.until_round)
