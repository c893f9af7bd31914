"""fedmtl config"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Settings
from fedmtl.cli.terminal import write


def config(
    file: Annotated[Path | None, typer.Argument(help="YAML file; without one, the demonstration's.")] = None,
    set: Settings = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config file.")] = False,
) -> None:
    """Check a config and print it with every default filled in."""
    from fedmtl.cli.run import load
    from fedmtl.config.file import config_schema, dump_config

    write(json.dumps(config_schema(), indent=2) if schema else dump_config(load(file, set or [])).rstrip("\n"))
