"""Output goes through one module: rich tables, plain lines and bars of stages, to a reader who may leave at any time.

Names, labels and reasons come from other machines and other people's files. Everything printed here passes
`Terminal.render_str`, where control characters become visible and rich's markup stays text.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fedmtl.foreign import printable

# Plain lines come at most this often.
SECONDS_BETWEEN_LINES = 10.0


class Terminal(Console):
    """A console that shows every string as it is written, and falls silent when its reader has gone.

    No string is markup, and none can move the cursor, colour or begin a line: styles are given as rich's objects.
    """

    def render_str(self, text: str, *, style: str | Style = "", justify: Any = None, **options: Any) -> Text:
        """Any string, a line or a table's cell or title, as text without markup and with visible control characters."""
        wanted = {name: options[name] for name in ("overflow",) if name in options}
        return Text(printable(text), style=style, justify=justify, **wanted)

    def on_broken_pipe(self) -> None:
        # `fedmtl run | head` has seen enough of the lines; the run is still wanted.
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def make_terminal(*, stderr: bool = False) -> Terminal:
    """Lines wrap in a terminal only; elsewhere each stays one line."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Terminal(stderr=stderr, highlight=False, soft_wrap=not is_terminal)


def stamped(line: str) -> str:
    """The line with this machine's date and time before it, for logs of processes that run for days."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"


def show(table: Table, notes: Sequence[str] = ()) -> None:
    """A table on stdout, and what is to be said of it below."""
    terminal = make_terminal()
    terminal.print(table, soft_wrap=False)
    for note in notes:
        terminal.print(note, markup=False)


def write(text: str, *, is_printable: bool = False) -> None:
    """Text of lines and tabs on stdout, with a line's end; in a terminal its other control characters are made visible.

    Into a file or a pipe it goes as it stands: rich would make spaces of its tabs, and a text that was read is data.
    Text that `is_printable` has no control characters but colours of ours.
    """
    terminal = make_terminal()
    if terminal.is_terminal and not is_printable:
        text = "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    try:
        print(text, file=terminal.file, flush=True)
    except BrokenPipeError:
        terminal.on_broken_pipe()


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
