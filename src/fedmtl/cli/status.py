"""fedmtl status"""

from __future__ import annotations

import json

from rich.table import Table

from fedmtl.cli.arguments import Json, Run
from fedmtl.cli.tables import amount, duration
from fedmtl.cli.terminal import show, write
from fedmtl.runs import find_run, read_events


def status(run: Run, json_: Json = False) -> None:
    """How far a run is: its rounds, the sites seen, the last failure."""
    from fedmtl.run_status import run_status

    found = find_run(run)
    told = run_status(read_events(found), found.name)
    if json_:
        write(json.dumps(told.to_json()))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("site", "tasks", "rounds", "last", "failures", "up", "down", "seconds"):
        table.add_column(column, justify="left" if column in ("site", "tasks") else "right")
    for name, site in told.sites.items():
        table.add_row(
            name,
            ", ".join(site.tasks),
            str(site.updates),
            "" if site.last_round is None else str(site.last_round),
            str(site.failures),
            amount(site.bytes_up),
            amount(site.bytes_down),
            duration(site.seconds),
        )
    failure = told.last_failure
    last = "none" if failure is None else f"{failure['client']} in round {failure['round']}: {failure['reason']}"
    show(table, [f"{told.name}: {told.status}, round {told.rounds} of {told.num_rounds}", f"last failure: {last}"])
