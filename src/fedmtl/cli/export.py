"""fedmtl export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedmtl import api
from fedmtl.cli.arguments import Client, Round, Run
from fedmtl.cli.terminal import write
from fedmtl.errors import ModelError


class Format(StrEnum):
    hf = "hf"
    onnx = "onnx"


def export(
    run: Run,
    to: Annotated[
        Format,
        typer.Option(help="hf: one folder a task that plain transformers loads; onnx: one file with every head."),
    ] = Format.hf,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder, or the ONNX file; otherwise `export`, `export/model.onnx` in the run's folder."),
    ] = None,
    client: Client = None,
    round: Round = None,
) -> None:
    """Write a finished run for other programs to load."""
    found = api.Run.open(run)
    if to is Format.onnx:
        file = found.export_onnx(out, client, round)
        write(f"{file}: {', '.join(found.model(client, round).tasks)} ({file.stat().st_size / 1e6:.1f} MB)")
        return
    written = found.export_hf(out, client, round)
    for task, result in written.items():
        write(f"{task}: {result}" if isinstance(result, Path) else f"not written: {result}")
    if not any(isinstance(result, Path) for result in written.values()):
        raise ModelError(
            f"{found.name}: no task can be written for plain transformers, for the reasons above;"
            " `--to onnx` writes all of them as they are"
        )
