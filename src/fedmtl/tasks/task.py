"""What a task is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Task:
    """One task as the model, the loop and the report see it; `resolve` builds it from the config.

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
        return len(self.text) == 2

    @property
    def is_dual(self) -> bool:
        return self.is_pair and self.pair == "dual"

    @property
    def is_regression(self) -> bool:
        return self.kind == "regression"


def task_fields(task: Task, pool: str) -> dict[str, Any]:
    """What a run tells of a task when it starts; `pool` is how the model pools for it."""
    return {
        "kind": task.kind,
        "labels": list(task.labels),
        "metric": task.metric,
        "auxiliary": task.auxiliary,
        "pair": task.pair if task.is_pair else None,
        "pool": pool,
        "score_range": list(task.score_range) if task.is_regression else None,
    }
