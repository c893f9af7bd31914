"""fedmtl policy"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.terminal import write
from fedmtl.errors import FedmtlError

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
