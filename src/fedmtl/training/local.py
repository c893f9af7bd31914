"""The local loop: a bound model, some shards, a number of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.model.binding import BoundModel
from fedmtl.seeds import derive_seed
from fedmtl.tasks.batches import Shard, training_batches
from fedmtl.training.learning_rate import rate_factor
from fedmtl.training.objective import Objective
from fedmtl.training.optimizer import FlatOptimizer, Slots
from fedmtl.training.settings import LocalSettings
from fedmtl.training.task_gradients import TaskGradients
from fedmtl.training.task_order import Step, alternate

# A loss is read back only now and then: on a GPU every reading waits for all work before it.
CHECK_STEPS = 64


class TrainingFailed(FedmtlError):
    """A client could not train: its loss was not a number, or it ran out of memory."""


@dataclass(frozen=True)
class Trained:
    """Mean training loss per task, the steps taken, the optimizer's state if it is kept, and what was measured."""

    losses: dict[str, float]
    steps: int
    optimizer: Slots
    inner_products: dict[str, list[list[float]]] = field(default_factory=dict)


def train(
    bound: BoundModel,
    shards: Mapping[str, Shard],
    settings: LocalSettings,
    *,
    round_number: int,
    seed: int,
    device: torch.device,
    kept: Slots | None = None,
) -> Trained:
    """Train the bound values in place; what happens follows from the arguments alone.

    Dropout draws from torch's global generator, which is seeded here.
    """
    torch.manual_seed(derive_seed(seed, "dropout"))
    optimizer = FlatOptimizer(bound, settings)
    if kept:
        optimizer.restore(kept)
    objective = Objective(bound, shards, device)
    gradients = TaskGradients(bound, settings.measured_layers)
    plan = list(planned_steps(shards, settings, seed, round_number))
    losses: list[Tensor] = []
    bound.model.train()
    for number, (task, batch) in enumerate(plan):
        loss = objective.loss(task, batch)
        losses.append(loss.detach())
        # Where a task's head and the encoder are fixed there is a loss to report and nothing to move.
        if loss.requires_grad:
            optimizer.backward(task, loss * settings.loss_weights[task])
            gradients.add(task, optimizer.reached(task))
            done = round_number - 1 + number / len(plan)
            optimizer.step(task, settings.learning_rates[task] * rate_factor(settings, done))
        if (number + 1) % CHECK_STEPS == 0:
            _check_finite(losses, plan, settings)
    bound.model.eval()
    _check_finite(losses, plan, settings)
    return Trained(
        _mean_losses(losses, plan),
        len(plan),
        optimizer.state() if settings.keep_optimizer else {},
        gradients.inner_products(),
    )


def _check_finite(losses: list[Tensor], plan: list[Step], settings: LocalSettings) -> None:
    recent = losses[-CHECK_STEPS:]
    if recent and not bool(torch.stack(recent).isfinite().all()):
        number, value = next((i, v.item()) for i, v in enumerate(losses) if not math.isfinite(v.item()))
        raise divergence(plan[number][0], value, number, settings)


def divergence(task: str, loss: float, step: int, settings: LocalSettings) -> TrainingFailed:
    """What to say where a loss was not a number, and which settings may help."""
    norm = settings.max_grad_norm
    return TrainingFailed(
        f"the loss of {task} became {loss} at step {step + 1}; lower training.learning_rate "
        f"({settings.learning_rates[task]:g} for {task}) or "
        + (f"training.max_grad_norm ({norm:g})" if norm else "set training.max_grad_norm")
    )


def _mean_losses(losses: list[Tensor], plan: list[Step]) -> dict[str, float]:
    sums: dict[str, tuple[float, int]] = {}
    for value, (task, batch) in zip(torch.stack(losses).tolist() if losses else [], plan, strict=True):
        total, count = sums.get(task, (0.0, 0))
        sums[task] = (total + value * len(batch), count + len(batch))
    return {task: total / count for task, (total, count) in sums.items()}


def planned_steps(shards: Mapping[str, Shard], settings: LocalSettings, seed: int, turn: int = 0) -> Iterator[Step]:
    """The (task, batch) of every step of the round; `turn` is what the round's clients have in common."""
    if not any(len(shard) for shard in shards.values()):
        return iter(())  # Without a batch in any epoch, `steps` would never be reached.
    epochs = itertools.count() if settings.steps else range(settings.epochs)
    steps = (
        step
        for epoch in epochs
        for step in alternate(
            {
                task: training_batches(
                    shard,
                    settings.batch_size,
                    derive_seed(seed, "batches", task, epoch),
                    derive_seed(turn, "turn", epoch),
                )
                for task, shard in shards.items()
            }
        )
    )
    return itertools.islice(steps, settings.steps) if settings.steps else steps


def num_steps(shard: Shard, settings: LocalSettings) -> int:
    """How many steps a client with this one shard takes in a round."""
    if not len(shard):
        return 0
    return settings.steps or settings.epochs * -(-len(shard) // settings.batch_size)
