"""The local loop: a bound model, some shards, a number of steps, and what each step minimises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Extra
from fedmtl.tasks.batches import Arrays, Shard, TextShard, collate, join_rows, sorted_batches, training_batches
from fedmtl.tasks.sequences import Rows, Sequences
from fedmtl.tasks.task import Task
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalClient, LocalMethods, LocalSettings, LocalStep, Step
from fedmtl.training.optimizer import (
    FlatOptimizer,
    Holding,
    Slots,
    batches_per_step,
    ordered_batches,
    rate_factor,
)


class Objective:
    """The loss of a batch, for the tasks of one client in one round; `methods` have been started."""

    def __init__(
        self,
        bound: BoundModel,
        shards: Mapping[str, Shard],
        device: torch.device,
        methods: LocalMethods | None = None,
    ) -> None:
        self._bound, self._shards, self._device = bound, shards, device
        self._methods = methods or LocalMethods()
        tasks = {name: bound.model.tasks[name] for name in shards}
        found = {
            name: task.kind_of.class_weights(task, shards[name].labels[shards[name].indices])
            for name, task in tasks.items()
        }
        self._class_weights = {
            task: None if weights is None else torch.from_numpy(weights).to(device) for task, weights in found.items()
        }

    def loss(self, task: str, batch: np.ndarray) -> Tensor:
        """What a step on these examples of the task's shard minimises; the model has its values afterwards."""
        model = self._bound.use(task)
        arrays = collate(self._shards[task], batch, model.pad_id, self._bound.index)
        inputs, labels = to_tensors(arrays, self._device)
        step = LocalStep(task, batch, inputs, labels, lambda outputs: self._labelled(step, outputs))
        outputs = self._methods.outputs(step)
        if outputs is None:
            outputs = model(task, inputs)
        fit = self._methods.fit(step, outputs)
        return self._methods.loss(step, outputs, step.labelled(outputs) if fit is None else fit)

    def _labelled(self, step: LocalStep, outputs: Tensor) -> Tensor:
        adjusted = self._methods.adjust(step, outputs)
        return task_loss(self._bound.model.tasks[step.task], adjusted, step.labels, self._class_weights[step.task])


@timed("batches")
def to_tensors(arrays: Arrays, device: torch.device) -> tuple[Inputs, Tensor]:
    """A batch on the device, with its labels."""
    places, windows = (None if part is None else torch.from_numpy(part) for part in (arrays.places, arrays.windows))
    ids, mask, segments = (torch.from_numpy(part) for part in (arrays.ids, arrays.mask, arrays.segments))
    return Inputs(ids, mask, segments, places, windows).to(device), torch.from_numpy(arrays.labels).to(device)


def task_loss(task: Task, outputs: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """The mean over the batch, or over the words in it; with class weights, the weighted mean."""
    losses = task.kind_of.losses(task, outputs, labels)
    if not len(losses):
        # No word of the batch has a token.
        return losses.sum()
    if class_weights is None:
        return losses.mean()
    weights = class_weights[labels]
    return (losses * weights).sum() / weights.sum()


@timed("scoring", whole=True)
def predict(bound: BoundModel, task: str, shard: Shard, batch_size: int, device: torch.device) -> tuple[Rows, float]:
    """Return the outputs in the order of `shard.indices`, and the summed loss."""
    outputs, losses = predict_together(bound, [task], shard, batch_size, device)
    return outputs[task], losses[task]


@torch.inference_mode()
def predict_together(
    bound: BoundModel,
    tasks: Sequence[str],
    shard: Shard | TextShard,
    batch_size: int,
    device: torch.device,
    *,
    labelled: bool = True,
) -> tuple[dict[str, Rows], dict[str, float]]:
    """Return each task's outputs in the order of `shard.indices`, and its summed loss, 0 where nothing is `labelled`.

    The tasks have the same values in their encoder and the same way of encoding, so that those which pool alike share
    a pass. Of a task on words an example has a row for every word, of zeros where it has no token, and its loss is the
    mean over its words.
    """
    model = bound.model.eval()  # A client whose training failed leaves it in training mode.
    of_tasks = {name: model.tasks[name] for name in tasks}
    outputs: dict[str, list[Rows]] = {name: [task.kind_of.no_outputs(task)] for name, task in of_tasks.items()}
    positions = [np.zeros(0, dtype=np.int64)]
    losses = dict.fromkeys(tasks, 0.0)
    for batch in sorted_batches(shard, batch_size):
        arrays = collate(shard, batch, model.pad_id, bound.index)
        inputs, labels = to_tensors(arrays, device)
        vectors: dict[tuple[str, ...], Tensor] = {}
        for name, task in of_tasks.items():
            pool = bound.use(name).pooled_alike(name)
            if pool not in vectors:
                vectors[pool] = model.vectors(name, inputs)
            logits = model.head(name, vectors[pool])
            if labelled:
                each = task.kind_of.losses(task, logits, labels).double()
                losses[name] += float(each.sum() if arrays.words is None else each.cpu() @ _shares(arrays.words))
            rows = logits.float().cpu().numpy()
            outputs[name].append(rows if arrays.words is None else _for_all_words(rows, arrays.words))
        positions.append(batch)
    order = np.argsort(np.concatenate(positions), kind="stable")
    ranks = np.argsort(np.argsort(shard.indices, kind="stable"), kind="stable")
    return {name: join_rows(parts)[order][ranks] for name, parts in outputs.items()}, losses


def _shares(words: Sequences) -> Tensor:
    """What each word that has a token counts for in the mean over its example's."""
    owners = words.owners()[words.values >= 0]
    return torch.from_numpy(1.0 / np.bincount(owners, minlength=len(words))[owners])


def _for_all_words(rows: np.ndarray, words: Sequences) -> Sequences:
    """Outputs of the words that have a token, with zeros for the others."""
    every = np.zeros((len(words.values), rows.shape[1]), rows.dtype)
    every[words.values >= 0] = rows
    return words.with_values(every)


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
    methods.start(LocalClient(bound, shards, device, seed, round_number, settings))
    optimizer = FlatOptimizer(bound, settings, methods)
    if saved:
        optimizer.restore(saved)
    objective = Objective(bound, shards, device, methods)
    planned = list(planned_steps(shards, settings, seed, round_number))
    plan = list(methods.plan_steps(planned))
    width = batches_per_step(sum(len(shard) > 0 for shard in shards.values()), settings)
    steps = len(plan) // width
    losses: list[Tensor] = []
    bound.model.train()
    for number in range(steps):
        moved = []
        for task, batch in plan[number * width : (number + 1) * width]:
            weight = settings.loss_weights[task]
            made = methods.differentiate(task, batch, weight, partial(optimizer.buffer, task))
            loss = objective.loss(task, batch) if made is None else made
            losses.append(loss.detach())
            if made is not None:
                optimizer.take(task)
            elif loss.requires_grad:
                weighed = methods.weigh(task, loss)
                optimizer.backward(task, loss * weight if weighed is None else weighed)
            else:
                # Where a task's head and the encoder are fixed there is a loss to report and nothing to move.
                continue
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
    # Those that were planned: how many were drawn in their place may be nobody's business.
    seen = _seen(planned)
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
    return {task: total / count for task, (total, count) in sums.items() if count}


def _seen(plan: list[Step]) -> dict[str, int]:
    seen: dict[str, int] = {}
    for task, batch in plan:
        seen[task] = seen.get(task, 0) + len(batch)
    return seen


def planned_steps(
    shards: Mapping[str, Shard], settings: LocalSettings, seed: int, round_number: int = 0
) -> Iterator[Step]:
    """Return the (task, batch) of all batches of the round; all clients of a round have its number in common."""
    sizes = {task: settings.batch_size_of(task, len(shard)) for task, shard in shards.items()}
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
    batches = sum(-(-len(shard) // settings.batch_size_of(task, len(shard))) for task, shard in shards.items())
    return (settings.steps or settings.epochs * batches) if batches else 0
