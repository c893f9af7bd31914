"""Runs of some seconds, and what the command line answered."""

from collections.abc import Callable
from dataclasses import dataclass

from small_config import SMALL

MADE = {
    "demo": (),
    "central": ("mode=centralized", "training.num_rounds=1"),
    "personal": ("sharing.rules=[{heads.*: client}, {'*': all}]", "training.num_rounds=1"),
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


Cli = Callable[..., Result]


def small(*overrides: str) -> list[str]:
    """The arguments of a run of some seconds."""
    return [part for override in (*SMALL, *overrides) for part in ("--set", override)]
