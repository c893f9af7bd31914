"""fedmtl quantize"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.arguments import Model, onnx_path
from fedmtl.cli.export import onnx_in, write_onnx
from fedmtl.cli.terminal import write
from fedmtl.runs import find_run

if TYPE_CHECKING:
    from fedmtl.compress.quantize import Quantized


class SchemeName(StrEnum):
    dynamic = "dynamic"
    qdq = "qdq"
    qoperator = "qoperator"


def quantize(
    run: Model,
    scheme: Annotated[
        SchemeName,
        typer.Option(help="dynamic: ranges of the text at hand; qdq, qoperator: ranges measured beforehand."),
    ] = SchemeName.dynamic,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; otherwise `model.SCHEME.onnx` beside it.")
    ] = None,
    all_ops: Annotated[
        bool, typer.Option("--all-ops", help="Everything that can, not only linear layers and embeddings.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="Texts of each task to measure on.")] = 64,
    texts: Annotated[
        Path | None, typer.Option(help="Lines of one text, or two with a tab, instead of the run's training text.")
    ] = None,
    reduce_range: Annotated[
        bool | None,
        typer.Option(help="Weights of 7 bits, for CPUs without VNNI; otherwise where this CPU needs it."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to time with; otherwise one per core.")] = None,
) -> None:
    """Make an INT8 ONNX file of a finished run, and say what that brings and costs."""
    from fedmtl.compress.onnx_file import require

    require("quantize", "onnx", "onnxscript", "onnxruntime")
    onnx = onnx_path(run)
    if onnx is None:
        onnx = _exported(run)
    from fedmtl.compress.quantize import Quantization, needs_reduced_range, quantize_measured
    from fedmtl.experiment.calibration import calibration_rows

    reduced = needs_reduced_range() if reduce_range is None else reduce_range
    how = Quantization(scheme.value, all_ops, reduced)
    file = out or onnx.with_name(f"{onnx.stem}.{scheme.value}.onnx")
    _tell(quantize_measured(onnx, file, how, lambda model: calibration_rows(model, texts, 2 * samples), threads))


def _exported(run: str) -> Path:
    found = find_run(run)
    file = onnx_in(found)
    write_onnx(found, file)
    return file


def _tell(made: Quantized) -> None:
    share = made.bytes_after / made.bytes_before
    write(f"{made.file}: {made.bytes_after / 1e6:.1f} MB, {share:.1%} of {made.bytes_before / 1e6:.1f} MB")
    gain = made.seconds_before / made.seconds_after
    write(
        f"one text of {made.length} tokens: {1e3 * made.seconds_after:.2f} ms, {gain:.2f} times as fast as"
        f" {1e3 * made.seconds_before:.2f} ms"
    )
    for task, share in made.agreement.items():
        write(f"{task}: same label for {share:.1%} of texts it was not measured on")
    if not made.is_damped:
        write("no texts: outliers were left as they are, which costs agreement; give --texts")
    if gain < 1:
        write(f"slower than the file in float on this machine; ship {made.source}, or try `--scheme dynamic`")
