"""The local loop: a bound model, some shards, a number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.model.binding import BoundModel
from fedmtl.seeds import derive_seed
from fedmtl.sharing.keys import Key
from fedmtl.tasks.batches import Shard, training_batches
from fedmtl.training.objective import Objective, weigh
from fedmtl.training.optimizer import FlatOptimizer, Slots
from fedmtl.training.schedules import Holding, Step, batches_per_step, ordered_batches, rate_factor
from fedmtl.training.settings import LocalSettings
from fedmtl.training.task_gradients import TaskGradients

# A loss is read back only now and then: on a GPU every reading waits for all work before it.
CHECK_STEPS = 64


class TrainingFailed(FedmtlError):
    """A client could not train: its loss was not a number, or it ran out of memory."""

    code = "training_failed"


@dataclass(frozen=True)
class Trained:
    """Mean training loss per task, the steps taken, and the optimizer's state if it is kept.

    `seen` counts the examples trained on of each task, every pass counted; `conflicts` is the share of pairs of tasks
    whose gradients pulled apart, and `inner_products` are of their gradients in some layers, where that was asked.
    """

    losses: dict[str, float]
    steps: int
    optimizer: Slots
    seen: dict[str, int] = field(default_factory=dict)
    conflicts: float | None = None
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
    pruned: Mapping[Key, Tensor] | None = None,
) -> Trained:
    """Train the bound values in place; what happens follows from the arguments alone.

    Dropout draws from torch's global generator, which is seeded here. Where `pruned` is true a weight is zero.
    """
    torch.manual_seed(derive_seed(seed, "dropout"))
    optimizer = FlatOptimizer(bound, settings, pruned)
    if kept:
        optimizer.restore(kept)
    objective = Objective(bound, shards, device, settings, seed)
    gradients = TaskGradients(bound, settings.measured_layers)
    plan = list(planned_steps(shards, settings, seed, round_number))
    width = batches_per_step(sum(len(shard) > 0 for shard in shards.values()), settings)
    steps = len(plan) // width
    losses: list[Tensor] = []
    apart = _Pairs(settings, seed)
    bound.model.train()
    for number in range(steps):
        moved = []
        for task, batch in plan[number * width : (number + 1) * width]:
            loss = objective.loss(task, batch)
            losses.append(loss.detach())
            # Where a task's head and the encoder are fixed there is a loss to report and nothing to move.
            if loss.requires_grad:
                optimizer.backward(task, weigh(bound.model, task, loss, settings))
                gradients.add(task, optimizer.reached(task))
                moved.append(task)
                if width > 1:
                    optimizer.keep(task)
        if moved:
            if width > 1:
                apart.join(optimizer, moved, number)
            done = round_number - 1 + number / steps
            optimizer.step(moved, settings.learning_rates[moved[0]] * rate_factor(settings, done))
            objective.stepped()
        if (number + 1) % CHECK_STEPS == 0:
            _check_finite(losses, plan, settings, width)
    bound.model.eval()
    _check_finite(losses, plan, settings, width)
    return Trained(
        _mean_losses(losses, plan),
        steps,
        optimizer.state() if settings.keep_optimizer else {},
        _seen(plan),
        apart.share,
        gradients.inner_products(),
    )


class _Pairs:
    """Joins the gradients of a step's tasks, and counts how many pairs of them pulled apart."""

    def __init__(self, settings: LocalSettings, seed: int) -> None:
        self._looks, self._seed = settings.gradients == "pcgrad", seed
        self._apart = self._all = 0

    def join(self, optimizer: FlatOptimizer, tasks: list[str], step: int) -> None:
        if not self._looks:
            optimizer.join(tasks)
            return
        generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "pcgrad", step)))
        self._apart += optimizer.join(tasks, generator)
        self._all += math.comb(len(tasks), 2)

    @property
    def share(self) -> float | None:
        return self._apart / self._all if self._all else None


def _check_finite(losses: list[Tensor], plan: list[Step], settings: LocalSettings, width: int) -> None:
    recent = losses[-CHECK_STEPS * width :]
    if recent and not bool(torch.stack(recent).isfinite().all()):
        number, value = next((i, v.item()) for i, v in enumerate(losses) if not math.isfinite(v.item()))
        raise divergence(plan[number][0], value, number // width, settings)


def divergence(task: str, loss: float, step: int, settings: LocalSettings) -> TrainingFailed:
    """What to say where a loss was not a number, and which settings may help."""
    norm = settings.max_grad_norm
    return TrainingFailed(
        f"the loss of {task} became {loss} at step {step + 1}; lower training.learning_rate "
        f"({settings.learning_rates[task]:g} for {task}) or "
        + (f"training.max_grad_norm ({norm:g})" if norm else "set training.max_grad_norm")
    ).coded("diverged", task)


def _mean_losses(losses: list[Tensor], plan: list[Step]) -> dict[str, float]:
    sums: dict[str, tuple[float, int]] = {}
    for value, (task, batch) in zip(torch.stack(losses).tolist() if losses else [], plan, strict=True):
        total, count = sums.get(task, (0.0, 0))
        sums[task] = (total + value * len(batch), count + len(batch))
    return {task: total / count for task, (total, count) in sums.items()}


def _seen(plan: list[Step]) -> dict[str, int]:
    seen: dict[str, int] = {}
    for task, batch in plan:
        seen[task] = seen.get(task, 0) + len(batch)
    return seen


def planned_steps(shards: Mapping[str, Shard], settings: LocalSettings, seed: int, turn: int = 0) -> Iterator[Step]:
    """The (task, batch) of all batches of the round; `turn` is what the round's clients have in common."""
    sizes = {task: settings.batch_size_of(task) for task in shards}
    held = {
        task: Holding(len(shard), -(-len(shard) // sizes[task]), partial(_pass, shard, sizes[task], seed, turn, task))
        for task, shard in shards.items()
        if len(shard)
    }
    return ordered_batches(held, settings, seed, turn) if held else iter(())


def _pass(shard: Shard, size: int, seed: int, turn: int, task: str, number: int) -> list[np.ndarray]:
    return training_batches(shard, size, derive_seed(seed, "batches", task, number), derive_seed(turn, "turn", number))


def num_steps(shards: Mapping[str, Shard], settings: LocalSettings) -> int:
    """How many steps a client takes in a round, where each is of one batch and no pass is drawn."""
    batches = sum(-(-len(shard) // settings.batch_size_of(task)) for task, shard in shards.items())
    return (settings.steps or settings.epochs * batches) if batches else 0
