"""A run's display is opened here; what it takes to show events is loaded then, and not for `--help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fedmtl.cli.terminal import make_terminal

if TYPE_CHECKING:
    from fedmtl.runs.event_lines import Event
    from fedmtl.runs.folder import RunFolder


class Display(Protocol):
    """Follows a run's events; as a context it holds the terminal. `name` is that of a run that is resumed."""

    name: str

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def say(self, line: str) -> None: ...
    def finish(self, run: RunFolder) -> None: ...


def make_display(*, stderr: bool = False) -> Display:
    """Live in a terminal, lines elsewhere; on stderr where stdout is to hold one JSON object."""
    from fedmtl.cli.display import LiveDisplay, PlainDisplay

    terminal = make_terminal(stderr=stderr)
    return LiveDisplay(terminal) if terminal.is_terminal else PlainDisplay(terminal)
