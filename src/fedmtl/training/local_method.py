"""What a client is given for training in one round: settings, and one class for each method beyond loss and optimizer.

Settings are plain values, so that they travel as JSON. A method overrides the hooks it needs. They are called in the
order of the config's methods, each hook at one moment of a step: `outputs`, `adjust`, `fit`, `loss` and `weigh` make
the loss of a batch, `task_gradient` follows a task's backward pass, `join` puts the gradients of several tasks
together, `gradient` comes before clipping, `stepped` after the optimizer has moved the values. `plan_steps` may draw
other batches before the first step, and `differentiate` take the place of a batch's loss and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmtl.config import TrainingConfig
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights
from fedmtl.tasks.batches import Shard

# Batches that `min_steps` makes smaller stay this large: below it, the noise of a step grows faster than their number.
SMALLEST_BATCH = 8


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
    # Steps on a task that a pass has at least, by smaller batches.
    min_steps: int | None = None
    # The client's half of every capability that is switched on, by name, with its options.
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def batch_size_of(self, task: str, num_examples: int | None = None) -> int:
        """Examples per step on a task; at a client with so many examples, fewer where `min_steps` says so."""
        size = self.batch_sizes.get(task, self.batch_size)
        if num_examples is None or self.min_steps is None:
            return size
        return min(size, max(SMALLEST_BATCH, num_examples // self.min_steps))

    @property
    def largest_batch(self) -> int:
        """The most examples of a step, whichever task it is of."""
        return max(map(self.batch_size_of, self.learning_rates), default=self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        # A site of a version without it takes every other job.
        return values if self.min_steps is not None else {k: v for k, v in values.items() if k != "min_steps"}

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
        min_steps=training.min_steps,
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


Found = TypeVar("Found")
# A task and the examples of one batch of it.
Step = tuple[str, np.ndarray]
# The keys that a step moves -> the flat buffer that their gradients are to be written into.
GradientBuffer = Callable[[Collection[Key]], Tensor]
# Which parts of the flat buffers two tasks have in common.
Shared = Callable[[str, str], Sequence[slice]]


@dataclass(frozen=True)
class Release:
    """What a client's answer to one job is known by: for methods whose noise nobody else may know.

    `secret` is the site's. `digest` is of all that the answer follows from, so that the same job has the same answer,
    and any other one a digest of its own. `folder` is where the client's files are. `required` is what the site's
    policy requires, by name, as plain values. Numbers of examples leave the site rounded up to a multiple of
    `counts_to`.
    """

    secret: bytes
    digest: str
    folder: Path
    required: Mapping[str, Any] = field(default_factory=dict)
    counts_to: int = 1


@dataclass(frozen=True)
class LocalClient:
    """The client whose round begins: its bound values, its examples, and what its public randomness derives from."""

    bound: BoundModel
    shards: Mapping[str, Shard]
    device: torch.device
    seed: int
    round: int
    settings: LocalSettings | None = None
    release: Callable[[], Release] | None = None


@dataclass(frozen=True)
class LocalStep:
    """The batch whose loss is made. `labelled` gives the task's loss of some outputs."""

    task: str
    batch: np.ndarray
    inputs: Inputs
    labels: Tensor
    labelled: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """Neighbours in the flat buffers that a step moves: where they lie, and views of their values and gradients."""

    span: slice
    values: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Finished:
    """What a method leaves behind: `sent` goes into the update, `stored` into the client's state of this round."""

    sent: Extra = NO_EXTRA
    stored: Extra = NO_EXTRA


class LocalMethod:
    """The hooks, all empty.

    `stacked` makes the method's half for clients that train as one computation (`training/stacked/method.py`) of the
    same options; a method that says nothing trains one client at a time. `more_passes` is whether its loss runs the
    encoder more than once in a step: gradients are then added up, where a single pass may write over them.
    `is_constraint` is whether it holds values to something whoever trains them, also the server. `clips_gradients` is
    whether it bounds gradients itself, so that training.max_grad_norm does not.
    """

    name: ClassVar[str]
    stacked: ClassVar[type[Any] | None] = None
    more_passes: ClassVar[bool] = False
    is_constraint: ClassVar[bool] = False
    clips_gradients: ClassVar[bool] = False

    def restore(self, slots: Mapping[str, Weights], received: Extra) -> Mapping[str, Weights]:
        """What the client has of earlier rounds, as far as it still counts."""
        return slots

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        """Before the first step: `received` came with the job, `stored` is of the last round the server accepted."""

    def plan_steps(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Return the batches of the round in place of those that were planned; their number and tasks stay."""
        return steps

    def differentiate(self, task: str, batch: np.ndarray, weight: float, buffer: GradientBuffer) -> Tensor | None:
        """Write a batch's gradients, times the task's weight, and return its loss; None leaves that to others."""
        return None

    def outputs(self, step: LocalStep) -> Tensor | None:
        """Return the outputs that the loss is made of, or None for those of one plain pass."""
        return None

    def adjust(self, step: LocalStep, outputs: Tensor) -> Tensor:
        """Return the outputs as the task's loss sees them."""
        return outputs

    def fit(self, step: LocalStep, outputs: Tensor) -> Tensor | None:
        """Return a loss that replaces the task's, or None to leave that, which `step.labelled` gives."""
        return None

    def loss(self, step: LocalStep, outputs: Tensor, loss: Tensor) -> Tensor:
        """The loss so far with what this method adds."""
        return loss

    def weigh(self, task: str, loss: Tensor) -> Tensor | None:
        """Return the task's part of what is minimised, or None for its loss times its weight."""
        return None

    def task_gradient(self, task: str, reached: Collection[Key], gradients: Tensor) -> None:
        """After a task's backward pass: the flat buffer has its gradients wherever it reaches."""

    def join(self, step: int, gradients: Mapping[str, Tensor], shared: Shared) -> Iterable[tuple[str, Tensor]] | None:
        """What is added up of several tasks' gradients in one step, task by task; None is the gradients themselves."""
        return None

    def gradient(self, parts: Sequence[Part]) -> None:
        """Change gradients before they are clipped and the optimizer moves the values."""

    def stepped(self, values: Tensor) -> None:
        """After the optimizer has moved the flat buffer of values."""

    def finish(self, tasks: Sequence[str]) -> Finished:
        """After the last step; `tasks` are those that the update will be of."""
        return Finished()


@dataclass(frozen=True)
class LocalMethods:
    """The methods of one client's round with what came for each of them; called where the loop has a hook."""

    methods: Sequence[LocalMethod] = ()
    received: Mapping[str, Extra] = field(default_factory=dict)
    stored: Mapping[str, Extra] = field(default_factory=dict)
    release: Callable[[], Release] | None = None

    def restore(self, slots: Mapping[str, Weights]) -> Mapping[str, Weights]:
        for method in self.methods:
            slots = method.restore(slots, self.received.get(method.name, NO_EXTRA))
        return slots

    def start(self, client: LocalClient) -> None:
        client.bound.model.adds_gradients = any(method.more_passes for method in self.methods)
        client = replace(client, release=self.release)
        for method in self.methods:
            name = method.name
            method.start(client, self.received.get(name, NO_EXTRA), self.stored.get(name, NO_EXTRA))

    @property
    def clips_gradients(self) -> bool:
        return any(method.clips_gradients for method in self.methods)

    def plan_steps(self, steps: Sequence[Step]) -> Sequence[Step]:
        for method in self.methods:
            steps = method.plan_steps(steps)
        return steps

    def differentiate(self, task: str, batch: np.ndarray, weight: float, buffer: GradientBuffer) -> Tensor | None:
        return self._first(lambda method: method.differentiate(task, batch, weight, buffer))

    def outputs(self, step: LocalStep) -> Tensor | None:
        return self._first(lambda method: method.outputs(step))

    def adjust(self, step: LocalStep, outputs: Tensor) -> Tensor:
        for method in self.methods:
            outputs = method.adjust(step, outputs)
        return outputs

    def fit(self, step: LocalStep, outputs: Tensor) -> Tensor | None:
        return self._first(lambda method: method.fit(step, outputs))

    def loss(self, step: LocalStep, outputs: Tensor, loss: Tensor) -> Tensor:
        for method in self.methods:
            loss = method.loss(step, outputs, loss)
        return loss

    def weigh(self, task: str, loss: Tensor) -> Tensor | None:
        return self._first(lambda method: method.weigh(task, loss))

    def task_gradient(self, task: str, reached: Collection[Key], gradients: Tensor) -> None:
        for method in self.methods:
            method.task_gradient(task, reached, gradients)

    def join(self, step: int, gradients: Mapping[str, Tensor], shared: Shared) -> Iterable[tuple[str, Tensor]]:
        return self._first(lambda method: method.join(step, gradients, shared)) or gradients.items()

    def gradient(self, parts: Sequence[Part]) -> None:
        for method in self.methods:
            method.gradient(parts)

    def stepped(self, values: Tensor) -> None:
        for method in self.methods:
            method.stepped(values)

    def finish(self, tasks: Sequence[str]) -> tuple[dict[str, Extra], dict[str, Extra]]:
        """What is sent with the update and what is stored at the client, by method; what is empty is left out."""
        finished = {method.name: method.finish(tasks) for method in self.methods}
        return (
            {name: one.sent for name, one in finished.items() if one.sent},
            {name: one.stored for name, one in finished.items() if one.stored},
        )

    def _first(self, call: Callable[[LocalMethod], Found | None]) -> Found | None:
        return next((found for method in self.methods if (found := call(method)) is not None), None)
