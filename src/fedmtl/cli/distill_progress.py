"""What a person sees of a distillation: bars in a terminal, plain lines elsewhere, and what is left of each score."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from fedmtl.cli.tables import duration, number
from fedmtl.cli.terminal import Terminal, make_terminal

if TYPE_CHECKING:
    from fedmtl.compress.distill.loop import Update

# Plain lines come at most this often.
SECONDS_BETWEEN_LINES = 10.0


def make_listener() -> PlainListener:
    """A bar in a terminal, lines elsewhere."""
    terminal = make_terminal()
    return LiveListener(terminal) if terminal.is_terminal else PlainListener(terminal)


class PlainListener:
    """One line per thing that happened, and one for the progress now and then."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.last_line = float("-inf")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)

    def update(self, update: Update) -> None:
        if update.share >= 1 or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.say(f"{update.stage} ({update.share:.1%}): {_words(update)}")


class LiveListener(PlainListener):
    """The same lines, with one bar a stage that stays at the bottom."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>5.1f}%"))
        self.progress = Progress(*columns, console=terminal)
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Any:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(None, None, None)

    def update(self, update: Update) -> None:
        words = f"{update.stage}: {_words(update)}"
        if update.stage not in self.bars:
            self.bars[update.stage] = self.progress.add_task(words, total=1.0)
        self.progress.update(self.bars[update.stage], description=words, completed=update.share)


def retention_table(teacher: Mapping[str, float | None], student: Mapping[str, float | None]) -> Table:
    """Every task's main metric before and after, and the share that is left."""
    table = Table("task", "teacher", "student", "retention")
    for task, before in teacher.items():
        after = student[task]
        share = "" if before is None or after is None or before <= 0 else f"{after / before:.1%}"
        table.add_row(task, number(before), number(after), share)
    return table


def _words(update: Update) -> str:
    losses = ", ".join(f"{name} {value:.4f}" for name, value in update.losses.items())
    left = f", {duration(update.seconds_left)} left" if update.share < 1 else ""
    return f"epoch {update.epoch}, {losses}; {update.examples_per_second:,.0f} examples/s{left}"
