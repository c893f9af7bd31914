"""fedmtl evaluate"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedmtl.cli.tables import number
from fedmtl.errors import FedmtlError
from fedmtl.runs import find_run


def evaluate(
    run: Annotated[str, typer.Argument(help="A run's name or folder.")],
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A labelled file with the task's columns, instead of validation.")
    ] = None,
    client: Annotated[str | None, typer.Option(help="With the values this client kept for itself.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
        print(json.dumps({"metrics": {name: s.metrics for name, s in scores.items()}, "tasks": record}))
        return
    table = Table("task", "metric", "value", "")
    for name, s in scores.items():
        for metric, value in s.metrics.items():
            table.add_row(name, metric, number(value), s.undefined.get(metric) or s.marked or "")
    Console(highlight=False).print(table)
