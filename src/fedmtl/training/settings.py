"""What the server tells a client about training in one round; plain values, so that they travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedmtl.config import TrainingConfig


@dataclass(frozen=True)
class LocalSettings:
    num_rounds: int
    epochs: int
    steps: int | None
    batch_size: int
    optimizer: str
    learning_rates: Mapping[str, float]
    head_rate: float
    loss_weights: Mapping[str, float]
    momentum: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    schedule: str
    warmup_rounds: float
    step_rounds: int
    step_factor: float
    proximal: float
    keep_optimizer: bool
    task_schedule: str
    anneal: float
    task_temperature: float
    gradients: str
    loss_weighting: str
    smart: Mapping[str, Any] | None = None
    distillation: Mapping[str, Any] | None = None
    # Layers of which a client with several tasks tells the inner products of its tasks' gradients.
    measured_layers: tuple[str, ...] = ()
    # Whether weights are pruned in this run; which ones, a job says.
    pruning: bool = False
    # Of tasks that do not take `batch_size`.
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    logit_adjustment: float = 0.0
    # With it: how often each label occurs at the clients of the round together, by task.
    label_counts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def batch_size_of(self, task: str) -> int:
        return self.batch_sizes.get(task, self.batch_size)

    @property
    def largest_batch(self) -> int:
        """The most examples of a step, whichever task it is of."""
        return max(map(self.batch_size_of, self.learning_rates), default=self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LocalSettings:
        lists = {"betas": tuple(values["betas"]), "measured_layers": tuple(values.get("measured_layers", ()))}
        return LocalSettings(**{**values, **lists})


def local_settings(
    training: TrainingConfig,
    learning_rates: Mapping[str, float | None],
    weights: Mapping[str, float],
    *,
    keep_optimizer: bool,
    batch_sizes: Mapping[str, int | None] | None = None,
) -> LocalSettings:
    """The config's training section with every task's own learning rate, loss weight and batch size filled in."""
    in_loss = training.task_weight_in == "loss"
    return LocalSettings(
        num_rounds=training.num_rounds,
        epochs=training.local_epochs,
        steps=training.local_steps,
        batch_size=training.batch_size,
        optimizer=training.optimizer,
        learning_rates={task: rate or training.learning_rate for task, rate in learning_rates.items()},
        head_rate=training.head_rate,
        loss_weights={task: weight if in_loss else 1.0 for task, weight in weights.items()},
        momentum=training.momentum,
        betas=training.betas,
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        schedule=training.schedule,
        warmup_rounds=training.warmup_rounds,
        step_rounds=training.step_rounds,
        step_factor=training.step_factor,
        proximal=training.proximal,
        keep_optimizer=keep_optimizer,
        task_schedule=training.task_schedule,
        anneal=training.anneal,
        task_temperature=training.task_temperature,
        gradients=training.gradients,
        loss_weighting=training.loss_weighting,
        smart=None if training.smart is None else training.smart.model_dump(),
        distillation=_taught(training, list(weights)),
        pruning=training.pruning is not None,
        batch_sizes={task: size for task, size in (batch_sizes or {}).items() if size},
        logit_adjustment=training.logit_adjustment,
    )


def with_one_loss(settings: LocalSettings, distillation: Mapping[str, Any] | None) -> LocalSettings:
    """These settings for steps on one task's loss alone, or a teacher's, without all that a client may add to it."""
    return replace(
        settings,
        loss_weights=dict.fromkeys(settings.loss_weights, 1.0),
        proximal=0.0,
        task_schedule="even" if settings.task_schedule == "joint" else settings.task_schedule,
        gradients="sum",
        loss_weighting="fixed",
        measured_layers=(),
        logit_adjustment=0.0,
        label_counts={},
        smart=None,
        distillation=distillation,
    )


def _taught(training: TrainingConfig, tasks: list[str]) -> dict[str, Any] | None:
    """What clients must know of their teacher: how its outputs count, and for which tasks."""
    told = training.distillation
    if told is None or told.where != "clients":
        return None
    return {"weight": told.weight, "temperature": told.temperature, "tasks": told.tasks or tasks}
