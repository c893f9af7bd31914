"""fedmtl evaluate"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.arguments import Client, Json, Model, onnx_path
from fedmtl.cli.tables import scores_table
from fedmtl.cli.terminal import show, write
from fedmtl.errors import FedmtlError
from fedmtl.runs import find_run

if TYPE_CHECKING:
    from fedmtl.tasks.metrics import Scores

    # Every task's scores, and its main metric.
    Scored = tuple[dict[str, Scores], dict[str, str]]


def evaluate(
    run: Model,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A labelled file with the task's columns, instead of validation.")
    ] = None,
    client: Client = None,
    json_: Json = False,
) -> None:
    """Score a finished run, or an ONNX file in its folder, on its validation data or on any labelled file."""
    if file is not None and task is None:
        raise FedmtlError("--file: needs --task, which says whose columns and labels the file has")
    onnx = onnx_path(run, client)
    scores, main_metrics = _score_onnx(onnx, task, file) if onnx else _score_run(run, client, task, file)
    if json_:
        record = {
            name: {"undefined": s.undefined, "examples": s.examples, "marked": s.marked} for name, s in scores.items()
        }
        write(json.dumps({"metrics": {name: s.metrics for name, s in scores.items()}, "tasks": record}))
        return
    show(scores_table(scores, main_metrics))


def _score_run(run: str, client: str | None, task: str | None, file: Path | None) -> Scored:
    found = find_run(run)
    from fedmtl.experiment.inference import evaluate_file, evaluate_validation, load_run

    loaded = load_run(found, client)
    scores = {task: evaluate_file(loaded, task, file)} if task and file else evaluate_validation(loaded, task)
    return scores, {name: loaded.saved.tasks[name].metric for name in scores}


def _score_onnx(onnx: Path, task: str | None, file: Path | None) -> Scored:
    from fedmtl.compress.onnx_file import open_onnx
    from fedmtl.experiment.onnx_inference import evaluate_file, evaluate_validation

    model = open_onnx(onnx)
    scores = {task: evaluate_file(model, task, file)} if task and file else evaluate_validation(model, task)
    return scores, {name: model.tasks[name].metric for name in scores}
