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
        typer.Option(help="hf: one folder a task that plain transformers loads; onnx: a folder that needs no fedmtl."),
    ] = Format.hf,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder; otherwise `export`, `export/onnx` in the run's. FILE.onnx: the graph alone."),
    ] = None,
    client: Client = None,
    round: Round = None,
) -> None:
    """Write a finished run for other programs to load."""
    found = api.Run.open(run)
    if to is Format.onnx:
        written = found.export_onnx(out, client, round)
        graph = written / "model.onnx" if written.is_dir() else written
        write(f"{written}: {', '.join(found.model(client, round).tasks)} ({graph.stat().st_size / 1e6:.1f} MB)")
        if written.is_dir():
            write(f"answers without fedmtl: python {written / 'predict.py'} TEXT")
        return
    folders = found.export_hf(out, client, round)
    for task, result in folders.items():
        write(f"{task}: {result}" if isinstance(result, Path) else f"not written: {result}")
    if not any(isinstance(result, Path) for result in folders.values()):
        raise ModelError(
            f"{found.name}: no task can be written for plain transformers, for the reasons above;"
            " `--to onnx` writes all of them as they are"
        )
