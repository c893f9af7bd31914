"""What a task is, which clients hold it, and in which rounds they train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from fedmtl.capabilities import is_task_kind, task_kind, task_kinds
from fedmtl.config import ClientConfig, Config, SourceConfig, TaskConfig
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.foreign import excerpt

if TYPE_CHECKING:
    from fedmtl.runs.events import TaskFacts
    from fedmtl.tasks.kinds.protocol import TaskKind

# A kind of task without a list of labels counts its scores in this many ranges.
SCORE_RANGES = 5


# Between a task's name and that of a further validation set, which no name has: `mnli:mismatched`.
SET_MARK = ":"


def owner_of_set(name: str) -> str:
    """The task of a validation set: `mnli` of `mnli:mismatched`, and of `mnli`, which is the set that counts."""
    return name.partition(SET_MARK)[0]


@dataclass(frozen=True)
class HiddenLayer:
    """The hidden layer of a head; a `size` of None is the encoder's width."""

    size: int | None = None
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    dropout: float = 0.1


@dataclass(frozen=True)
class Windows:
    """How texts that are longer than a sequence are cut into several; see `config.WindowsConfig`."""

    stride: int | None = None
    most: int = 8
    pool: Literal["mean", "max", "attention"] = "mean"

    @property
    def learns(self) -> bool:
        """Whether a task has a vector that its windows are weighed by."""
        return self.pool == "attention"


@dataclass(frozen=True)
class Task:
    """One task with every default filled in: the columns it reads, what it predicts, and how it trains.

    A regression's scores lie in `score_range`; the model predicts them scaled to 0..1. `outputs` is 1 where a
    classification of two labels has one output for both. `head` is its head's hidden layer, where it has one;
    one that is pretrained starts with the values in the encoder's folder. `fitted` is what its kind fits on validation
    when the model is finished. `windows` says how texts that are longer than a sequence are cut, None that they end.
    """

    name: str
    kind: str
    text: tuple[str, ...]
    label: str
    metric: str
    labels: tuple[str, ...] = ()
    score_range: tuple[float, float] = (0.0, 1.0)
    pair: Literal["cross", "dual"] = "cross"
    pool: Literal["auto", "pooler", "cls", "mean"] = "auto"
    outputs: int = 2
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    weight: float = 1.0
    learning_rate: float | None = None
    batch_size: int | None = None
    dropout: float = 0.1
    patience: int | None = None
    auxiliary: bool = False
    head: HiddenLayer | None = None
    head_start: Literal["fresh", "pretrained"] = "fresh"
    fitted: tuple[float, ...] = ()
    windows: Windows | None = None

    @property
    def is_pair(self) -> bool:
        """Whether an example has two texts."""
        return len(self.text) == 2

    @property
    def is_dual(self) -> bool:
        """Whether the two texts of an example are encoded apart and then compared."""
        return self.is_pair and self.pair == "dual"

    @property
    def kind_of(self) -> TaskKind:
        """The task's kind, which answers whatever depends on what is predicted."""
        return task_kind(self.kind)


def windows_of(tasks: Mapping[str, Task]) -> Windows | None:
    """How a model's tasks read long texts in windows, which is a setting of all of them."""
    return next((task.windows for task in tasks.values()), None)


def task_facts(task: Task, pool: str) -> TaskFacts:
    """What a run says of a task when it starts; `pool` is how the model pools for it."""
    from fedmtl.runs.events import TaskFacts
    from fedmtl.runs.log import METRICS

    kind, scale = task.kind_of, task.kind_of.scale(task)
    return TaskFacts(
        kind=task.kind,
        labels=list(task.labels),
        metric=task.metric,
        auxiliary=task.auxiliary,
        pair=task.pair if task.is_pair else None,
        pool=pool,
        score_range=None if scale is None else list(scale),
        # A reader of the run may not have the package that the kind is from.
        metrics=None if task.kind in METRICS else list(kind.metrics),
    )


def read_tasks(raw: Any, where: str, error: type[FedmtlError]) -> dict[str, Task]:
    """The tasks of a file, name -> fields as `asdict` gave them; anything else is an error with `where`."""
    from pydantic import ValidationError

    try:
        tasks: dict[str, Task] = _task_adapter().validate_python(raw)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
        path = excerpt(".".join(map(str, first["loc"])))
        raise error(f"{where}: its tasks are not ours ({path}: {excerpt(first['msg'])})") from None
    for name, task in tasks.items():
        problem = _problem(name, task)
        if problem:
            raise error(f"{where}: its task {excerpt(repr(name))} is not one of ours ({excerpt(problem)})")
    if not tasks:
        raise error(f"{where}: has no task")
    return tasks


@lru_cache(maxsize=1)
def _task_adapter() -> Any:
    from pydantic import TypeAdapter

    # Not strict: JSON has no tuples. Numbers are bounded below.
    return TypeAdapter(dict[str, Task])


def _problem(name: str, task: Task) -> str | None:
    if task.name != name or "." in name:
        return "it has another name"
    if len(task.text) not in (1, 2):
        return "it has neither one text nor two"
    if task.windows is not None and min(task.windows.most, task.windows.stride or 1) < 1:
        return "its windows have no tokens"
    if not is_task_kind(task.kind):
        return f"its kind {task.kind!r} is not known here; there are {', '.join(task_kinds())}"
    return task.kind_of.problem(task)


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
