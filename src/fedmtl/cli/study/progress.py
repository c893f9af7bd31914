"""What a person sees while a grid of runs goes on: a bar of cells in a terminal, a line per cell elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedmtl.cli.tables import duration
from fedmtl.cli.terminal import Terminal, make_terminal

if TYPE_CHECKING:
    from fedmtl.study.grid import Outcome, Standing


class GridLines:
    """A line for every cell that ended, with the time left for the whole grid."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.told = 0

    def __enter__(self) -> GridLines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, standing: Standing) -> None:
        fresh = standing.outcomes[self.told :]
        kept = sum(outcome.status == "kept" for outcome in fresh)
        if kept:
            self.say(f"{kept} of {standing.total} cells were finished before")
        for number, outcome in enumerate(fresh, start=self.told + 1):
            if outcome.status != "kept":
                self.say(_line(outcome, number, standing))
        self.told = len(standing.outcomes)

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)


class GridDisplay(GridLines):
    """The same lines, with a bar of cells and the open ones that stay at the bottom."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=terminal)
        self.bar = self.progress.add_task("cells", total=None)
        self.live = Live(self.progress, console=terminal, refresh_per_second=2, transient=True)

    def __enter__(self) -> GridDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def __call__(self, standing: Standing) -> None:
        super().__call__(standing)
        self.progress.update(self.bar, total=standing.total, completed=len(standing.outcomes))
        self.live.update(self._view(standing))

    def _view(self, standing: Standing) -> RenderableType:
        running = ", ".join(f"{name} {share:.0%}" for name, share in standing.running.items())
        left = "" if standing.seconds_left is None else f"{duration(standing.seconds_left)} left; "
        return Group(self.progress, Text(f"{left}{running or 'starting'}"))


def make_grid_display() -> GridLines:
    """Live in a terminal, lines elsewhere."""
    terminal = make_terminal()
    return GridDisplay(terminal) if terminal.is_terminal else GridLines(terminal)


def _line(outcome: Outcome, number: int, standing: Standing) -> str:
    left = "" if not standing.seconds_left else f", {duration(standing.seconds_left)} left"
    if outcome.status == "failed":
        return f"  {number} of {standing.total}: {outcome.cell} failed: {outcome.reason}"
    return f"  {number} of {standing.total}: {outcome.cell} in {duration(outcome.seconds)}{left}"
