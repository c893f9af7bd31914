"""Where output goes: rich tables and plain lines, to a reader who may leave at any time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """A console that falls silent, rather than ending the program, when its reader has gone."""

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


def show(table: Table, notes: Sequence[str] = ()) -> None:
    """A table on stdout, and what is to be said of it below."""
    terminal = make_terminal()
    terminal.print(table, soft_wrap=False)
    for note in notes:
        terminal.print(note, markup=False)


def write(text: str) -> None:
    """Text on stdout as it stands, with a line's end; rich would turn its tabs into spaces."""
    terminal = make_terminal()
    try:
        print(text, file=terminal.file, flush=True)
    except BrokenPipeError:
        terminal.on_broken_pipe()
