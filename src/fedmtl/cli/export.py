"""fedmtl export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Client, Run
from fedmtl.cli.terminal import write
from fedmtl.errors import ModelError
from fedmtl.runs.folder import RunFolder, find_run


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
) -> None:
    """Write a finished run for other programs to load."""
    found = find_run(run)
    if to is Format.onnx:
        file = out or onnx_in(found)
        tasks = write_onnx(found, file, client)
        write(f"{file}: {', '.join(tasks)} ({file.stat().st_size / 1e6:.1f} MB)")
    else:
        _write_folders(found, out or found.path / "export", client)


def onnx_in(run: RunFolder) -> Path:
    """Where a run's ONNX file lies unless told otherwise."""
    return run.path / "export" / "model.onnx"


def write_onnx(run: RunFolder, file: Path, client: str | None = None) -> tuple[str, ...]:
    """Write the file, and give the tasks it answers."""
    from fedmtl.predict.onnx import require

    require("export --to onnx", "onnx", "onnxscript")
    from fedmtl.export.onnx import export_onnx
    from fedmtl.predict.run import load_run

    loaded = load_run(run, client)
    export_onnx(loaded.saved, loaded.bound, file)
    return tuple(loaded.tasks)


def _write_folders(run: RunFolder, folder: Path, client: str | None) -> None:
    from fedmtl.export.hf import export_hf
    from fedmtl.predict.run import load_run

    loaded = load_run(run, client)
    written = export_hf(loaded.saved, loaded.bound, folder)
    for task, result in written.items():
        write(f"{task}: {result}" if isinstance(result, Path) else f"not written: {result}")
    if not any(isinstance(result, Path) for result in written.values()):
        raise ModelError(
            f"{run.name}: no task can be written for plain transformers;"
            " train with `model.pair: cross` and `model.pool: cls` (or `pooler`)"
        )
