"""fedmtl flower: a run as an app on Flower's SuperLink"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.deploy import needs_flower
from fedmtl.cli.terminal import write

flower = typer.Typer(name="flower", help="A run as an app on Flower's SuperLink.", no_args_is_help=True)


@flower.callback()
def only_commands() -> None:
    """A run as an app on Flower's SuperLink."""


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to write.", metavar="DIR")],
    config: Annotated[Path | None, typer.Option(help="YAML file; without one, the demonstration's.")] = None,
) -> None:
    """Write a Flower app whose server and sites are fedmtl's, for `flwr run`."""
    needs_flower("fedmtl flower")
    from fedmtl.deploy.flower_project import write_project

    clients = write_project(folder, config)
    write(f"{folder}: a Flower app of {len(clients)} clients; its README.md has the commands")
