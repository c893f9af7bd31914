"""A run's display is opened here; what it takes to show events is loaded then, and not for `--help`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from fedmtl.cli.terminal import make_terminal
from fedmtl.errors import ConfigError

if TYPE_CHECKING:
    from fedmtl.runs.event_lines import Event
    from fedmtl.runs.folder import RunFolder

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print what was averaged over whom, and the bytes of every round.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print what was chosen, warnings, failures and the last lines only.")
]


class Detail(Enum):
    """How much of a run is printed; its events.jsonl has all of it in any case."""

    quiet = "quiet"
    short = "short"
    verbose = "verbose"


def detail_of(verbose: bool, quiet: bool) -> Detail:
    """The detail that `--verbose` and `--quiet` ask for; both together are a ConfigError."""
    if verbose and quiet:
        raise ConfigError("--verbose and --quiet: contradict each other; give one of them, or none")
    return Detail.verbose if verbose else Detail.quiet if quiet else Detail.short


class Display(Protocol):
    """Follows a run's events; as a context it holds the terminal. `name` is that of a run that is resumed."""

    name: str

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def say(self, line: str) -> None: ...
    def finish(self, run: RunFolder) -> None: ...


def make_display(detail: Detail = Detail.short, *, stderr: bool = False, has_times: bool = False) -> Display:
    """Live in a terminal, lines elsewhere; on stderr where stdout is to hold one JSON object.

    With `has_times`, every line begins with its date and time.
    """
    from fedmtl.cli.display import LiveDisplay, PlainDisplay

    terminal = make_terminal(stderr=stderr)
    display = LiveDisplay(terminal, detail) if terminal.is_terminal else PlainDisplay(terminal, detail)
    display.has_times = has_times
    return display
