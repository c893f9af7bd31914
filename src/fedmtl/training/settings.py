"""What a client is given for training in one round; plain values, so that they travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
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
    keep_optimizer: bool
    task_schedule: str
    anneal: float
    task_temperature: float
    # Of tasks that do not take `batch_size`.
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    # The client's half of every capability that is switched on, by name, with its options.
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
        return LocalSettings(**{**values, "betas": tuple(values["betas"])})


def local_settings(
    training: TrainingConfig,
    learning_rates: Mapping[str, float | None],
    weights: Mapping[str, float],
    *,
    keep_optimizer: bool,
    batch_sizes: Mapping[str, int | None] | None = None,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
) -> LocalSettings:
    """Return the config's training section with the learning rate, loss weight and batch size of every task."""
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
        keep_optimizer=keep_optimizer,
        task_schedule=training.task_schedule,
        anneal=training.anneal,
        task_temperature=training.task_temperature,
        batch_sizes={task: size for task, size in (batch_sizes or {}).items() if size},
        methods=methods or {},
    )


def with_methods(settings: LocalSettings, methods: Mapping[str, Mapping[str, Any]]) -> LocalSettings:
    """These settings for steps of one task each, all alike, with these methods and no other."""
    return replace(
        settings,
        loss_weights=dict.fromkeys(settings.loss_weights, 1.0),
        task_schedule="even" if settings.task_schedule == "joint" else settings.task_schedule,
        methods=methods,
    )
