"""The local loop: a bound model, some shards, a number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.model.binding import BoundModel
from fedmtl.seeds import derive_seed
from fedmtl.sharing.extra import Extra
from fedmtl.tasks.batches import Shard, training_batches
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalClient, LocalMethods
from fedmtl.training.objective import Objective
from fedmtl.training.optimizer import FlatOptimizer, Slots
from fedmtl.training.schedules import Holding, Step, batches_per_step, ordered_batches, rate_factor
from fedmtl.training.settings import LocalSettings

# A loss is read back only now and then: on a GPU every reading waits for all work before it.
CHECK_STEPS = 64


class TrainingFailed(FedmtlError):
    """A client could not train: its loss was not a number, or it ran out of memory."""

    code = "training_failed"


@dataclass(frozen=True)
class Trained:
    """Mean training loss per task, the steps taken, and the optimizer's state where it goes on in the next round.

    `seen` counts the examples trained on of each task, every pass counted; `tasks` are those that an update is of.
    `sent` goes into that update and `stored` into the client's state, by method.
    """

    losses: dict[str, float]
    steps: int
    optimizer: Slots
    seen: dict[str, int] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    sent: Mapping[str, Extra] = field(default_factory=dict)
    stored: Mapping[str, Extra] = field(default_factory=dict)


@timed("forward and backward")
def train(
    bound: BoundModel,
    shards: Mapping[str, Shard],
    settings: LocalSettings,
    *,
    round_number: int,
    seed: int,
    device: torch.device,
    saved: Slots | None = None,
    methods: LocalMethods | None = None,
) -> Trained:
    """Train the bound values, which change; what happens follows from the arguments alone.

    Dropout draws from torch's global generator, which is seeded here.
    """
    torch.manual_seed(derive_seed(seed, "dropout"))
    methods = methods or LocalMethods()
    methods.start(LocalClient(bound, shards, device, seed, round_number))
    optimizer = FlatOptimizer(bound, settings, methods)
    if saved:
        optimizer.restore(saved)
    objective = Objective(bound, shards, device, methods)
    plan = list(planned_steps(shards, settings, seed, round_number))
    width = batches_per_step(sum(len(shard) > 0 for shard in shards.values()), settings)
    steps = len(plan) // width
    losses: list[Tensor] = []
    bound.model.train()
    for number in range(steps):
        moved = []
        for task, batch in plan[number * width : (number + 1) * width]:
            loss = objective.loss(task, batch)
            losses.append(loss.detach())
            # Where a task's head and the encoder are fixed there is a loss to report and nothing to move.
            if loss.requires_grad:
                weighed = methods.weigh(task, loss)
                optimizer.backward(task, loss * settings.loss_weights[task] if weighed is None else weighed)
                moved.append(task)
                if width > 1:
                    optimizer.keep(task)
        if moved:
            if width > 1:
                optimizer.join(moved, number)
            done = round_number - 1 + number / steps
            optimizer.step(moved, settings.learning_rates[moved[0]] * rate_factor(settings, done))
        if (number + 1) % CHECK_STEPS == 0:
            _check_finite(losses, plan, settings, width)
    bound.model.eval()
    _check_finite(losses, plan, settings, width)
    seen = _seen(plan)
    tasks = returned_tasks(list(shards), settings, seen)
    optimizer_state = optimizer.state() if settings.keep_optimizer else {}
    return Trained(_mean_losses(losses, plan), steps, optimizer_state, seen, tasks, *methods.finish(tasks))


def returned_tasks(tasks: Sequence[str], settings: LocalSettings, seen: Mapping[str, int]) -> tuple[str, ...]:
    """The tasks that an update is of: where tasks are drawn, only those that were.

    A head that was never trained would hold back its mean, and its examples would count for an encoder they did not
    train.
    """
    if settings.task_schedule == "even" or not seen:
        return tuple(tasks)
    return tuple(task for task in tasks if task in seen)


def _check_finite(losses: list[Tensor], plan: list[Step], settings: LocalSettings, width: int) -> None:
    recent = losses[-CHECK_STEPS * width :]
    if recent and not bool(torch.stack(recent).isfinite().all()):
        number, value = next((i, v.item()) for i, v in enumerate(losses) if not math.isfinite(v.item()))
        raise divergence(plan[number][0], value, number // width, settings)


def divergence(task: str, loss: float, step: int, settings: LocalSettings) -> TrainingFailed:
    """Return the error for a loss that is not finite, with the settings that may help."""
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


def planned_steps(
    shards: Mapping[str, Shard], settings: LocalSettings, seed: int, round_number: int = 0
) -> Iterator[Step]:
    """Return the (task, batch) of all batches of the round; all clients of a round have its number in common."""
    sizes = {task: settings.batch_size_of(task) for task in shards}
    holdings = {
        task: Holding(
            len(shard), -(-len(shard) // sizes[task]), partial(_pass, shard, sizes[task], seed, round_number, task)
        )
        for task, shard in shards.items()
        if len(shard)
    }
    return ordered_batches(holdings, settings, seed, round_number) if holdings else iter(())


def _pass(shard: Shard, size: int, seed: int, round_number: int, task: str, number: int) -> list[np.ndarray]:
    return training_batches(
        shard, size, derive_seed(seed, "batches", task, number), derive_seed(round_number, "turn", number)
    )


def num_steps(shards: Mapping[str, Shard], settings: LocalSettings) -> int:
    """How many steps a client takes in a round, where each is of one batch and no pass is drawn."""
    batches = sum(-(-len(shard) // settings.batch_size_of(task)) for task, shard in shards.items())
    return (settings.steps or settings.epochs * batches) if batches else 0
