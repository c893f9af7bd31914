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
    sentence_transformers = "sentence-transformers"
    onnx = "onnx"


def export(
    run: Run,
    to: Annotated[
        Format,
        typer.Option(
            help="hf: folders that transformers loads; sentence-transformers: vectors of texts, and heads of single"
            " texts; onnx: a folder that needs no fedmtl."
        ),
    ] = Format.hf,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder; otherwise `export`, `export/sentence-transformers`, `export/onnx` in the run's."
            " FILE.onnx: the graph alone."
        ),
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
    if to is Format.sentence_transformers:
        folders = found.export_sentence_transformers(out, client, round)
        for task, result in folders.items():
            write(f"{task}: {result}" if isinstance(result, Path) else f"not written: {result}")
        if not any(isinstance(result, Path) for result in folders.values()):
            raise ModelError(f"{found.name}: no task can be written for sentence-transformers, for the reasons above")
        return
    made = found.export_hf(out, client, round)
    for task, folder in made.folders.items():
        if task not in made.reasons:
            write(f"{task}: {folder}")
    for task, reason in made.reasons.items():
        write(f"{task}: {reason}, which plain classes of transformers cannot do")
    if made.every_task is not None:
        write(
            f"{', '.join(made.folders)}: {made.every_task}, with a modelling file of its own; load it with"
            f' AutoModel.from_pretrained("{made.every_task}", trust_remote_code=True)'
        )
