"""fedmtl compare"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedmtl.cli.arguments import Json, complete_run
from fedmtl.cli.tables import comparison_table
from fedmtl.cli.terminal import show, write
from fedmtl.errors import FedmtlError
from fedmtl.run_summary import summarize
from fedmtl.runs import find_run, read_events


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Names or folders of runs; the first is what others are compared to.", autocompletion=complete_run
        ),
    ],
    json_: Json = False,
) -> None:
    """Put runs side by side, with differences, parameters and bytes."""
    found = [find_run(name) for name in runs]
    if len(found) < 2:
        raise FedmtlError(f"compare: found only {found[0].name}; name two runs or more")
    summaries = [summarize(read_events(run), run.name) for run in found]
    if json_:
        write(json.dumps({"runs": [{**s.to_json(), "parameters": s.parameters} for s in summaries]}))
    else:
        show(comparison_table(summaries))
