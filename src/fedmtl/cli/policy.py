"""fedmtl policy, fedmtl audit: what a site lets a server have of it, and what came and left"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedmtl.cli.terminal import write
from fedmtl.errors import FedmtlError
from fedmtl.foreign import printable

policy = typer.Typer(name="policy", help="What a site lets a server have of it.", no_args_is_help=True)


@policy.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("policy.yaml"),
) -> None:
    """Write a policy with the strict defaults, and a sentence for each line."""
    from fedmtl.federation.policy import policy_text

    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(policy_text())
    except FileExistsError:
        raise FedmtlError(f"{file}: is there already; change it, or name another file") from None
    write(f"{file}: change what you need, then start the site with `fedmtl client --policy {file} ...`")


@policy.command()
def check(file: Annotated[Path, typer.Argument(help="A policy.", metavar="FILE")]) -> None:
    """Read a policy, and say what it lets leave; a mistake is named with its key."""
    from fedmtl.federation.policy import read_policy

    write(read_policy(file).words())


audit = typer.Typer(name="audit", help="A site's record of every message in and out.", no_args_is_help=True)

Where = Annotated[Path, typer.Argument(help="A site's folder, or its audit.jsonl.", metavar="FOLDER")]


@audit.command()
def verify(folder: Where) -> None:
    """Follow the chain of hashes, and say where it is broken."""
    from fedmtl.engines.flower.audit import verify as follow

    found = follow(folder)
    for number in found.cuts:
        write(f"line {number} was cut while it was written")
    if found.broken is not None:
        raise FedmtlError(f"{folder}: the chain is broken: {found.broken}")
    write(f"{found.lines} lines, each follows from the one before; the last hash is {found.last}")


@audit.command()
def show(folder: Where) -> None:
    """Print the record, one line a message."""
    from fedmtl.engines.flower.audit import entries

    for entry in entries(folder):
        write(_line(entry))


def _line(entry: dict[str, Any]) -> str:
    """The facts that a reader looks for first; foreign values come escaped."""
    shown = [f"{_plain(entry.get('number')):>5}", _plain(entry.get("time")), f"{_plain(entry.get('way')):>3}"]
    shown += [_plain(entry.get("kind")), f"{_plain(entry.get('bytes'))} bytes"]
    for key in ("job", "round", "tasks", "tensors", "values", "answers", "rows", "personal", "warnings", "decision"):
        if key in entry:
            shown.append(f"{key} {_plain(entry[key])}")
    return "  ".join([*shown, _plain(entry.get("sha256"))[:16]])


def _plain(value: Any) -> str:
    return printable(",".join(map(str, value)) if isinstance(value, list) else str(value))
