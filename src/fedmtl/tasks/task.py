"""What a task is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt

if TYPE_CHECKING:
    from fedmtl.runs.events import TaskFacts


@dataclass(frozen=True)
class Task:
    """One task with every default filled in: the columns it reads, what it predicts, and how it trains.

    A regression's scores lie in `score_range`; the model predicts them scaled to 0..1.
    """

    name: str
    kind: Literal["classification", "regression"]
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

    @property
    def is_pair(self) -> bool:
        """Whether an example has two texts."""
        return len(self.text) == 2

    @property
    def is_dual(self) -> bool:
        """Whether the two texts of an example are encoded apart and then compared."""
        return self.is_pair and self.pair == "dual"

    @property
    def is_regression(self) -> bool:
        """Whether the task predicts a score; otherwise it predicts a label."""
        return self.kind == "regression"


def task_facts(task: Task, pool: str) -> TaskFacts:
    """What a run says of a task when it starts; `pool` is how the model pools for it."""
    from fedmtl.runs.events import TaskFacts

    return TaskFacts(
        kind=task.kind,
        labels=list(task.labels),
        metric=task.metric,
        auxiliary=task.auxiliary,
        pair=task.pair if task.is_pair else None,
        pool=pool,
        score_range=list(task.score_range) if task.is_regression else None,
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
            raise error(f"{where}: its task {excerpt(repr(name))} is not one of ours ({problem})")
    if not tasks:
        raise error(f"{where}: has no task")
    return tasks


# A head is as wide as there are labels.
MOST_LABELS = 100_000


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
    if task.outputs not in (1, 2):
        return "a head has one output or two"
    if task.outputs == 1 and not task.is_regression and len(task.labels) != 2:
        return "one output is for two labels"
    low, high = task.score_range
    fits = -1e30 < low < high < 1e30 if task.is_regression else 2 <= len(task.labels) <= MOST_LABELS
    return None if fits else "it has no range of scores, or no labels"
