"""The training loop of general distillation, and its checkpoint.

The checkpoint has everything that a pretraining needs to go on, in one file that is written whole or not at all.
"""

from __future__ import annotations

import io
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.compress.pretrain.steps import Step
from fedmtl.compress.pretrain.student import Student
from fedmtl.errors import CannotContinue, FedmtlError
from fedmtl.runs.folder import write_atomic
from fedmtl.training.optimizer import scheduled

# Losses are read back once in so many steps: on a GPU every reading waits for all work before it.
LOG_STEPS = 50


@dataclass
class Position:
    """How far a pretraining is: steps and seconds of training, segments seen, and the log so far."""

    step: int = 0
    seconds: float = 0.0
    num_segments: int = 0
    num_tokens: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def save_checkpoint(
    path: Path, fingerprint: str, position: Position, student: Student, optimizer: torch.optim.Optimizer
) -> None:
    data = io.BytesIO()
    content = {
        "fingerprint": fingerprint,
        "position": vars(position),
        "student": student.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, data)
    write_atomic(path, data.getvalue())


def load_checkpoint(path: Path, fingerprint: str, student: Student, optimizer: torch.optim.Optimizer) -> Position:
    """Load the student's and the optimizer's values; other settings than the checkpoint's are an error."""
    device = next(student.parameters()).device
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that it did not write
        raise FedmtlError(f"{path}: cannot be read as a checkpoint; delete it and start without --resume") from error
    if not isinstance(content, dict) or content.get("fingerprint") != fingerprint:
        raise FedmtlError(
            f"{path}: was made with other settings or texts; give the same, or delete it and start without --resume"
        )
    try:
        position = Position(**content["position"])
        student.load_state_dict(content["student"])
        optimizer.load_state_dict(content["optimizer"])
    except Exception as error:  # torch's kinds for what does not fit, and Python's for what is not there
        raise FedmtlError(f"{path}: does not fit its settings; delete it and start without --resume") from error
    return position


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
    """Train from `position` to the end, updating both; with `steps`, all that happens follows from the arguments.

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
            # The next step may write its loss to the same memory.
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
