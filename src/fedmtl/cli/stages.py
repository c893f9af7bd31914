"""What a person sees of work in stages: a bar for each in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedmtl.cli.terminal import Terminal, make_terminal
from fedmtl.foreign import printable

# Plain lines come at most this often.
SECONDS_BETWEEN_LINES = 10.0


def make_stages() -> Stages:
    terminal = make_terminal()
    return StageBars(terminal) if terminal.is_terminal else Stages(terminal)


class Stages:
    """One line per thing that happened, and one for a stage's progress now and then and at its end."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.last_line = time.monotonic()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)

    def show(self, stage: str, share: float, words: str) -> None:
        """How far a stage is, and what is to be said of it."""
        if share >= 1 or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.say(f"{stage} ({share:.1%}): {words}")


class StageBars(Stages):
    """The same lines, with one bar a stage that stays at the bottom."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        described = TextColumn("{task.description}", markup=False)
        columns = (described, BarColumn(), TextColumn("{task.percentage:>5.1f}%"))
        self.progress = Progress(*columns, console=terminal)
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Any:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(None, None, None)

    def show(self, stage: str, share: float, words: str) -> None:
        if stage not in self.bars:
            self.bars[stage] = self.progress.add_task(printable(stage), total=1.0)
        described = printable(f"{stage}: {words}")
        self.progress.update(self.bars[stage], description=described, completed=min(1.0, share))
