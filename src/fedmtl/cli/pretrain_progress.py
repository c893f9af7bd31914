"""What a person sees while an encoder is distilled: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedmtl.cli.tables import duration

if TYPE_CHECKING:
    from fedmtl.compress.pretrain.loop import Update

# Plain lines come at most this often.
SECONDS_BETWEEN_LINES = 10.0


def make_listener() -> PlainListener:
    """A bar in a terminal, lines elsewhere."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    return LiveListener(console) if console.is_terminal else PlainListener(console)


class PlainListener:
    """One line per thing that happened, and one for the progress now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last_line = float("-inf")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def advance(self, stage: str, done: int, total: int) -> None:
        if done == total:
            self.say(f"{stage}: {total:,} segments")

    def update(self, update: Update) -> None:
        if update.share >= 1 or update.seconds - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = update.seconds
            self.say(f"step {update.step:,} ({update.share:.1%}): {_losses(update)}; {_speed(update)}")


class LiveListener(PlainListener):
    """The same lines, with bars that stay at the bottom."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>5.1f}%"))
        self.progress = Progress(
            *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console
        )
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Any:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(None, None, None)

    def advance(self, stage: str, done: int, total: int) -> None:
        self._bar(stage, stage, done / total)

    def update(self, update: Update) -> None:
        self._bar("training", f"loss {update.losses['total']:.4f}, {_speed(update)}", update.share)

    def _bar(self, name: str, description: str, share: float) -> None:
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(description, total=1.0)
        self.progress.update(self.bars[name], description=description, completed=min(1.0, share))


def _losses(update: Update) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in update.losses.items())


def _speed(update: Update) -> str:
    speed = f"{update.segments_per_second:,.0f} segments/s, {update.tokens_per_second:,.0f} tokens/s"
    return (
        f"{speed}, {duration(update.seconds_left)} left" if update.share < 1 else f"{speed}, {duration(update.seconds)}"
    )
