"""What a person sees of a distillation: its stages, and what is left of each score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from fedmtl.cli.stages import Stages
from fedmtl.cli.tables import duration, number
from fedmtl.compress.measure.measured import retention

if TYPE_CHECKING:
    from fedmtl.compress.distill.loop import Update


class Listener:
    """Tells what a distillation tells."""

    def __init__(self, stages: Stages) -> None:
        self.say, self._stages = stages.say, stages

    def update(self, update: Update) -> None:
        self._stages.show(update.stage, update.share, _words(update))


def retention_table(teacher: Mapping[str, float | None], student: Mapping[str, float | None]) -> Table:
    """Every task's main metric before and after, and the share that is left."""
    table = Table("task", "teacher", "student", "retention")
    for task, before in teacher.items():
        share = retention(student[task], before)
        table.add_row(task, number(before), number(student[task]), "" if share is None else f"{share:.1%}")
    return table


def _words(update: Update) -> str:
    losses = ", ".join(f"{name} {value:.4f}" for name, value in update.losses.items())
    left = f", {duration(update.seconds_left)} left" if update.share < 1 else ""
    return f"epoch {update.epoch}, {losses}; {update.examples_per_second:,.0f} examples/s{left}"
