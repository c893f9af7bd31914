"""Where output goes: rich tables and plain lines, to a reader who may leave at any time.

Names, labels and reasons come from other machines and other people's files. Everything printed here passes one place,
`Terminal.render_str`, where control characters become visible and rich's markup stays text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fedmtl.foreign import printable


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


def show(table: Table, notes: Sequence[str] = ()) -> None:
    """A table on stdout, and what is to be said of it below."""
    terminal = make_terminal()
    terminal.print(table, soft_wrap=False)
    for note in notes:
        terminal.print(note, markup=False)


def write(text: str) -> None:
    """Text of lines and tabs on stdout, with a line's end; in a terminal its other control characters are made visible.

    Into a file or a pipe it goes as it stands: rich would turn its tabs into spaces, and a text that was read is data.
    """
    terminal = make_terminal()
    if terminal.is_terminal:
        text = "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    try:
        print(text, file=terminal.file, flush=True)
    except BrokenPipeError:
        terminal.on_broken_pipe()
