"""fedmtl export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Client, Run
from fedmtl.cli.terminal import write
from fedmtl.errors import ModelError
from fedmtl.runs import find_run


class Format(StrEnum):
    hf = "hf"


def export(
    run: Run,
    to: Annotated[Format, typer.Option(help="hf: one folder a task that plain transformers loads.")] = Format.hf,
    out: Annotated[Path | None, typer.Option(help="Where to write; otherwise `export` in the run's folder.")] = None,
    client: Client = None,
) -> None:
    """Write a finished run for other programs to load."""
    found = find_run(run)
    from fedmtl.compress.export_hf import export_hf
    from fedmtl.experiment.inference import load_run

    loaded = load_run(found, client)
    written = export_hf(loaded.saved, loaded.bound, out or found.path / "export")
    for task, result in written.items():
        write(f"{task}: {result}" if isinstance(result, Path) else f"not written: {result}")
    if not any(isinstance(result, Path) for result in written.values()):
        raise ModelError(
            f"{found.name}: no task can be written for plain transformers;"
            " train with `model.pair: cross` and `model.pool: cls` (or `pooler`)"
        )
