"""What a person sees while an encoder is distilled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmtl.cli.stages import Stages
from fedmtl.cli.tables import duration

if TYPE_CHECKING:
    from fedmtl.compress.pretrain.loop import Update


class Listener:
    """Tells what pretraining tells."""

    def __init__(self, stages: Stages) -> None:
        self.say, self._stages = stages.say, stages

    def advance(self, stage: str, done: int, total: int) -> None:
        self._stages.show(stage, done / total, f"{done:,} of {total:,} segments")

    def update(self, update: Update) -> None:
        words = f"step {update.step:,}, {_losses(update)}; {_speed(update)}"
        self._stages.show("training", update.share, words)


def _losses(update: Update) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in update.losses.items())


def _speed(update: Update) -> str:
    speed = f"{update.segments_per_second:,.0f} segments/s, {update.tokens_per_second:,.0f} tokens/s"
    return (
        f"{speed}, {duration(update.seconds_left)} left" if update.share < 1 else f"{speed}, {duration(update.seconds)}"
    )
