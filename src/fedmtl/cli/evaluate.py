"""fedmtl evaluate"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Client, Json, Run
from fedmtl.cli.tables import scores_table
from fedmtl.cli.terminal import show, write
from fedmtl.errors import FedmtlError
from fedmtl.runs import find_run


def evaluate(
    run: Run,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A labelled file with the task's columns, instead of validation.")
    ] = None,
    client: Client = None,
    json_: Json = False,
) -> None:
    """Score a finished run on its validation data, or on any labelled file."""
    if file is not None and task is None:
        raise FedmtlError("--file: needs --task, which says whose columns and labels the file has")
    found = find_run(run)
    from fedmtl.experiment.inference import evaluate_file, evaluate_validation, load_run

    loaded = load_run(found, client)
    scores = {task: evaluate_file(loaded, task, file)} if task and file else evaluate_validation(loaded, task)
    if json_:
        record = {
            name: {"undefined": s.undefined, "examples": s.examples, "marked": s.marked} for name, s in scores.items()
        }
        write(json.dumps({"metrics": {name: s.metrics for name, s in scores.items()}, "tasks": record}))
        return
    main_metrics = {name: loaded.saved.tasks[name].metric for name in scores}
    show(scores_table(scores, main_metrics))
