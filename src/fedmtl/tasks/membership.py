"""Which clients hold which tasks, and in which rounds they train them."""

from __future__ import annotations

from fedmtl.config import ClientConfig, Config, SourceConfig, TaskConfig
from fedmtl.errors import ConfigError


def task_clients(config: Config) -> dict[str, list[str]]:
    """For each task, in config order, the clients that hold it in any round; each task has at least one."""
    for name, task in config.tasks.items():
        _check_rounds(f"tasks.{name}", task)
    if not config.clients:
        return {name: _made_clients(name, config.federation.clients_per_task) for name in config.tasks}
    for name, client in config.clients.items():
        _check_client(config, name, client)
    holders = {
        task: [name for name, client in config.clients.items() if task in _held(client)] for task in config.tasks
    }
    for name, clients in holders.items():
        if not clients:
            raise ConfigError(
                f"tasks.{name}: no client holds it; add `{name}` to the tasks of a client under `clients`, "
                "or remove the task"
            )
    return holders


def own_sources(config: Config, task: str) -> dict[str, SourceConfig]:
    """The clients that bring files of their own for a task, with those files."""
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
        held = _trained(config.clients[client], round)
    else:
        held = {client.rpartition("_client")[0]}
        assert held <= config.tasks.keys(), f"{client} is no client of this config"
    return tuple(name for name, task in config.tasks.items() if name in held and _covers(task, round))


def _made_clients(task: str, num_clients: int) -> list[str]:
    if num_clients == 1:
        return [f"{task}_client"]
    width = len(str(num_clients))
    return [f"{task}_client_{number:0{width}}" for number in range(1, num_clients + 1)]


def _held(client: ClientConfig) -> set[str]:
    return set(client.tasks).union(*client.tasks_from_round.values())


def _trained(client: ClientConfig, round: int) -> set[str]:
    if not _covers(client, round):
        return set()
    begun = [start for start in client.tasks_from_round if start <= round]
    return set(client.tasks_from_round[max(begun)] if begun else client.tasks)


def _covers(span: TaskConfig | ClientConfig, round: int) -> bool:
    return span.from_round <= round and (span.until_round is None or round <= span.until_round)


def _check_rounds(where: str, span: TaskConfig | ClientConfig) -> None:
    if span.until_round is not None and span.from_round > span.until_round:
        raise ConfigError(
            f"{where}.until_round: found {span.until_round}, before from_round {span.from_round}; "
            f"write {span.from_round} or more, or remove it"
        )


def _check_client(config: Config, name: str, client: ClientConfig) -> None:
    where = f"clients.{name}"
    _check_rounds(where, client)
    _check_known(config, f"{where}.tasks", client.tasks)
    for start, tasks in client.tasks_from_round.items():
        _check_known(config, f"{where}.tasks_from_round.{start}", tasks)
    for task in client.source:
        if task not in _held(client):
            raise ConfigError(
                f"{where}.source.{task}: found a source for a task the client does not hold; "
                f"add `{task}` to {where}.tasks or remove the source"
            )


def _check_known(config: Config, where: str, tasks: list[str]) -> None:
    for task in tasks:
        if task not in config.tasks:
            raise ConfigError(f"{where}: found {task!r}, which is no task here; write one of {', '.join(config.tasks)}")
