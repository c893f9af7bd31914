"""fedmtl compare"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from fedmtl.cli.tables import comparison_table
from fedmtl.run_summary import summarize
from fedmtl.runs import find_run, read_events


def compare(
    runs: Annotated[
        list[str], typer.Argument(help="Names or folders of runs; the first is what others are compared to.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put runs side by side, with differences, parameters and bytes."""
    found = [find_run(name) for name in runs]
    summaries = [summarize(read_events(run), run.name) for run in found]
    if json_:
        print(json.dumps({"runs": [{**s.to_json(), "parameters": s.parameters} for s in summaries]}))
        return
    Console(highlight=False).print(comparison_table(summaries))
