"""The training loop of general distillation."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.compress.pretrain.checkpoint import Position
from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.compress.pretrain.steps import Step
from fedmtl.errors import CannotContinue, FedmtlError
from fedmtl.training.learning_rate import scheduled

# Losses are read back once in so many steps: on a GPU every reading waits for all work before it.
LOG_STEPS = 50


class Interrupted(FedmtlError):
    """Ctrl-C or SIGTERM ended it after a whole step, and a checkpoint is there."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Update:
    """Where the training is: the share done, mean losses since the last one, and the speed over that time."""

    step: int
    share: float
    losses: dict[str, float]
    learning_rate: float
    segments_per_second: float
    tokens_per_second: float
    seconds: float
    seconds_left: float


def distil(
    step: Step,
    settings: PretrainSettings,
    position: Position,
    *,
    save: Callable[[], None],
    save_every: int,
    report: Callable[[Update], None],
) -> None:
    """Train in place from `position` to the end; with `steps`, all that happens follows from the arguments.

    `save` is called every `save_every` steps and when a signal ends the loop, after `position` is up to date.
    """
    meter = _Meter(settings, position)
    with _signals() as received:
        while meter.share() < 1.0:
            rate = settings.learning_rate * scheduled("cosine", meter.share(ahead=1), 1.0, settings.warmup)
            batch = step.data.epochs.batch(position.step)
            losses = step(batch, position.step, rate)
            meter.add(losses, batch.num_tokens)
            if position.step % LOG_STEPS == 0 or meter.share() >= 1.0 or received:
                report(meter.read(rate))
            if received:
                save()
                raise Interrupted(
                    f"ended by {signal.Signals(received[0]).name} after step {position.step}; "
                    "go on with the same command and --resume",
                    received[0],
                )
            if position.step % save_every == 0:
                save()


class _Meter:
    """Keeps the position up to date, and sums of losses on the device until they are read."""

    def __init__(self, settings: PretrainSettings, position: Position) -> None:
        self.settings, self.position = settings, position
        self.begun = time.monotonic() - position.seconds
        self._reset()

    def share(self, ahead: int = 0) -> float:
        """How much of the training is done, `ahead` steps from now where steps are what counts."""
        if self.settings.steps is not None:
            return (self.position.step + ahead) / (self.settings.steps + ahead)
        assert self.settings.minutes is not None
        return (time.monotonic() - self.begun) / (60 * self.settings.minutes)

    def add(self, losses: dict[str, Tensor], num_tokens: int) -> None:
        for name, loss in losses.items():
            # The next step may write its loss to the same place.
            self.sums[name] = loss.clone() if name not in self.sums else self.sums[name] + loss
        self.num_steps += 1
        self.position.step += 1
        self.position.num_segments += self.settings.batch
        self.position.num_tokens += num_tokens
        self.position.seconds = time.monotonic() - self.begun

    def read(self, rate: float) -> Update:
        """What happened since the last reading; it goes into the log as well."""
        position = self.position
        values = (torch.stack(list(self.sums.values())) / self.num_steps).tolist()
        losses = dict(zip(self.sums, values, strict=True))
        if not math.isfinite(losses["total"]):
            raise CannotContinue(
                f"the loss became {losses['total']} at step {position.step}; lower --learning-rate "
                f"({self.settings.learning_rate:g})"
            )
        position.seconds = time.monotonic() - self.begun
        passed = max(1e-9, position.seconds - self.since[0])
        share = self.share()
        update = Update(
            position.step,
            share,
            losses,
            rate,
            (position.num_segments - self.since[1]) / passed,
            (position.num_tokens - self.since[2]) / passed,
            position.seconds,
            position.seconds * (1 - share) / max(share, 1e-9),
        )
        position.log.append({"step": position.step, "learning_rate": rate, "seconds": position.seconds, **losses})
        self._reset()
        return update

    def _reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.num_steps = 0
        self.since = (self.position.seconds, self.position.num_segments, self.position.num_tokens)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM put their number into; a second one is the system's to handle."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
