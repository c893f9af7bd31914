"""fedmtl doctor: what stands in the way of a run on this machine, and what to do about it"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.arguments import Json
from fedmtl.cli.terminal import show, write

if TYPE_CHECKING:
    from fedmtl.deploy.machine import Finding

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="The run's YAML file; without one, the demonstration's.", metavar="FILE")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="A site's policy: what of --config it forbids is named.", metavar="FILE")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="With --policy: the tasks the site brings, with commas between; otherwise all."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Where a server is to listen: whether the port is free.", metavar="HOST:PORT")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="A server that runs: its clock against this machine's.", metavar="HOST:PORT")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="With --server: its ca.crt.", metavar="FILE")] = None,
    key: Annotated[Path | None, typer.Option(help="With --server: this site's NAME.key.", metavar="FILE")] = None,
    certs: Annotated[
        Path | None,
        typer.Option(
            help="A server's or a site's folder of certificates and keys: ends, pairs, rights.", metavar="DIR"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Look over this machine: versions, kernels, GPU, clocks, ports, certificates, disks, tokenizer, policy.

    Nothing is changed. The exit code is 0 where nothing would stop a run, otherwise 2.
    """
    from fedmtl.deploy.doctor import Examined, as_json, examine

    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    examined = Examined(config, policy, names, listen, server, ca, key, certs)
    found = examine(examined)
    if json_:
        write(as_json(found, examined.left_out()))
    else:
        _print(found, examined.left_out())
    if any(each.level == "fault" for each in found):
        raise typer.Exit(2)


def _print(found: Sequence[Finding], left_out: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "about", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for each in found:
        table.add_row(Text(each.level, style=COLOURS[each.level]), each.about, each.found, each.remedy)
    faults, warnings = (sum(each.level == level for each in found) for level in ("fault", "warning"))
    notes = ["", f"faults: {faults}, warnings: {warnings}, lines in all: {len(found)}"]
    notes += [f"not looked at: {'; '.join(left_out)}"] if left_out else []
    show(table, notes)
