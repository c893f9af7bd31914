"""The training loop of both stages: one pass over all tasks' examples at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedmtl.capabilities import local_methods
from fedmtl.compress.distill.intermediate import Intermediate
from fedmtl.errors import CannotContinue
from fedmtl.model.multitask import BoundModel
from fedmtl.model.tensor_files import SEPARATOR
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Key
from fedmtl.tasks.batches import Shard, collate
from fedmtl.training.local import Objective, planned_steps, to_tensors
from fedmtl.training.local_method import LocalClient, LocalMethods, LocalSettings
from fedmtl.training.optimizer import FlatOptimizer, rate_factor

# Losses are read back once in so many steps: on a GPU every reading waits for all work before it.
LOG_STEPS = 50

Slots = dict[str, Any]


@dataclass(frozen=True)
class Update:
    """Where a stage is: its pass, the share of the stage that is done, mean losses since the last one."""

    stage: str
    epoch: int
    share: float
    losses: dict[str, float]
    examples_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Passed:
    """One pass over the examples: the mean training loss and the examples seen of each task."""

    losses: dict[str, float]
    seen: dict[str, int]


class Lesson(Protocol):
    """The losses that a stage minimises; a step follows the gradient of `total`."""

    def losses(self, task: str, batch: np.ndarray) -> dict[str, Tensor]: ...


class IntermediateLesson:
    """The teacher's states; without dropout on either side."""

    def __init__(self, inner: Intermediate, shards: Mapping[str, Shard], device: torch.device) -> None:
        self._inner, self._shards, self._device = inner, shards, device

    def losses(self, task: str, batch: np.ndarray) -> dict[str, Tensor]:
        arrays = collate(self._shards[task], batch, self._inner.student.model.pad_id, None)
        found = self._inner.losses(task, to_tensors(arrays, self._device)[0])
        return {"total": self._inner.total(found), **found}


class PredictionLesson:
    """The teacher's outputs, stored beside the tokens, and a share of the labels where the settings give one."""

    def __init__(
        self, bound: BoundModel, shards: Mapping[str, Shard], settings: LocalSettings, device: torch.device
    ) -> None:
        methods = LocalMethods(local_methods(settings.methods))
        methods.start(LocalClient(bound, shards, device, seed=0, round=0))
        self._objective = Objective(bound, shards, device, methods)

    def losses(self, task: str, batch: np.ndarray) -> dict[str, Tensor]:
        return {"total": self._objective.loss(task, batch)}


class Stepper:
    """The student's optimizer and, with the same rate, that of projections it is not saved with."""

    def __init__(
        self, bound: BoundModel, settings: LocalSettings, methods: LocalMethods, extra: nn.Module | None = None
    ) -> None:
        self._flat, self._settings = FlatOptimizer(bound, settings, methods), settings
        self._extra = [] if extra is None else list(extra.parameters())
        self._adam = torch.optim.AdamW(self._extra, lr=0.0, weight_decay=0.0) if self._extra else None

    def step(self, task: str, loss: Tensor, rate: float) -> None:
        if self._adam is not None:
            self._adam.zero_grad()
        self._flat.backward(task, loss)
        self._flat.step([task], rate)
        if self._adam is not None:
            if self._settings.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(self._extra, self._settings.max_grad_norm)
            self._adam.param_groups[0]["lr"] = rate
            self._adam.step()

    def state(self) -> Slots:
        """All that a later `restore` needs, in types that torch saves safely."""
        flat = {
            slot: {SEPARATOR.join(key): value for key, value in values.items()}
            for slot, values in self._flat.state().items()
        }
        return {
            "flat": flat,
            "extra": [value.detach().cpu().clone() for value in self._extra],
            "adam": self._adam.state_dict() if self._adam is not None else {},
        }

    def restore(self, slots: Slots) -> None:
        flat = {
            slot: {Key(*name.split(SEPARATOR, 1)): value for name, value in values.items()}
            for slot, values in slots["flat"].items()
        }
        self._flat.restore(flat)
        with torch.no_grad():
            for value, saved in zip(self._extra, slots["extra"], strict=True):
                value.copy_(saved)
        if self._adam is not None:
            self._adam.load_state_dict(slots["adam"])


class Meter:
    """Mean losses, the speed and the time left of one stage."""

    def __init__(self, stage: str, num_epochs: int, report: Callable[[Update], None]) -> None:
        self.stage, self.num_epochs, self._report = stage, num_epochs, report
        self._begun = self._last = time.monotonic()
        self._first_share: float | None = None
        self._recent: dict[str, Tensor] = {}
        self._steps = self._examples = 0

    def add(self, losses: dict[str, Tensor], examples: int) -> None:
        for name, loss in losses.items():
            self._recent[name] = self._recent.get(name, 0.0) + loss.detach()
        self._steps += 1
        self._examples += examples

    def read(self, epoch: int, share: float) -> None:
        """Tell what happened since the last reading; a loss that is not a number ends the stage."""
        values = {name: float(value) / self._steps for name, value in self._recent.items()}
        if not math.isfinite(values.get("total", 0.0)):
            raise CannotContinue(
                f"the {self.stage} loss became {values['total']} in epoch {epoch}; lower --rate-{self.stage}"
            )
        now = time.monotonic()
        if self._first_share is None:
            # What a resumed stage had done before took no time of ours.
            self._first_share = (epoch - 1) / self.num_epochs
        done = share - self._first_share
        left = (now - self._begun) * (1 - share) / max(done, 1e-9)
        speed = self._examples / max(now - self._last, 1e-9)
        self._report(Update(self.stage, epoch, share, values, speed, left))
        self._last, self._recent, self._steps, self._examples = now, {}, 0, 0


def train_epoch(
    lesson: Lesson,
    stepper: Stepper,
    shards: Mapping[str, Shard],
    settings: LocalSettings,
    epoch: int,
    seed: int,
    meter: Meter,
) -> Passed:
    """Train the values for one pass; the result follows from the values, the stepper, the epoch and the seed."""
    epoch_seed = derive_seed(seed, meter.stage, epoch)
    torch.manual_seed(derive_seed(epoch_seed, "dropout"))
    plan = list(planned_steps(shards, settings, epoch_seed, epoch))
    sums: dict[str, Tensor] = {}
    seen = dict.fromkeys(shards, 0)
    for number, (task, batch) in enumerate(plan):
        losses = lesson.losses(task, batch)
        rate = settings.learning_rates[task] * rate_factor(settings, epoch - 1 + number / len(plan))
        stepper.step(task, losses["total"], rate)
        sums[task] = sums.get(task, 0.0) + losses["total"].detach() * len(batch)
        seen[task] += len(batch)
        meter.add(losses, len(batch))
        if (number + 1) % LOG_STEPS == 0 or number + 1 == len(plan):
            meter.read(epoch, (epoch - 1 + (number + 1) / len(plan)) / meter.num_epochs)
    return Passed({task: float(value) / seen[task] for task, value in sums.items()}, seen)
