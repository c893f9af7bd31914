"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_run(incomplete: str) -> list[str]:
    """The runs here whose name begins so; for the shell."""
    names = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    return [name for name in names if name.startswith(incomplete)]


Run = Annotated[str, typer.Argument(help="A run's name or folder.", autocompletion=complete_run)]
Client = Annotated[str | None, typer.Option(help="With the values this client kept for itself.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace one setting, such as training.num_rounds=5.", metavar="KEY=VALUE"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="YAML file; without one, a demonstration on embedded data.", metavar="[CONFIG]"),
]
