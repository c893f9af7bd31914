"""fedmtl certs, fedmtl enroll"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.server import needs_flower
from fedmtl.cli.terminal import write
from fedmtl.errors import FedmtlError

certs = typer.Typer(name="certs", help="Certificates and keys of a run between machines.", no_args_is_help=True)

Host = Annotated[
    list[str] | None,
    typer.Option(help="A name or address at which sites reach the server; loopback is always among them."),
]


@certs.command()
def init(folder: Annotated[Path, typer.Argument(help="Where to put them.", metavar="DIR")], host: Host = None) -> None:
    """Make a certificate authority and the server's certificate."""
    needs_flower()
    from fedmtl.engines.flower.certificates import make_authority

    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", *(host or _own_addresses())])
    make_authority(folder, list(hosts))
    write(f"{folder}: server certificate for {', '.join(hosts)}; sites need {folder / 'ca.crt'}")


@certs.command()
def node(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    folder: Annotated[Path, typer.Option(help="Where to put its key.")] = Path(),
) -> None:
    """Make a site's key; run it at the site, and send NAME.pub to the server's keeper."""
    needs_flower()
    from fedmtl.engines.flower.certificates import make_node_key

    private, public = make_node_key(name, folder)
    write(f"{private} stays here; enrol {public} at the server")


def enroll(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    key: Annotated[Path, typer.Option(help="The site's NAME.pub.")],
    tasks: Annotated[str, typer.Option(help="The tasks it may bring, with commas between.")],
    certs: Annotated[Path, typer.Option(help="The server's folder of `fedmtl certs init`.")] = Path("certs"),
) -> None:
    """Let a site join, and say for which tasks; a running server follows."""
    needs_flower()
    from fedmtl.engines.flower.certificates import CA
    from fedmtl.engines.flower.enrolment import enroll as enter

    if not (certs / CA).is_file():
        raise FedmtlError(f"{certs}: has no {CA}; make it with `fedmtl certs init {certs}`, or give --certs")
    if not key.is_file():
        raise FedmtlError(f"{key}: no such file; the site makes it with `fedmtl certs node {name}`")
    names = [task.strip() for task in tasks.split(",") if task.strip()]
    enter(certs, name, key.read_bytes(), names)
    write(f"{name} may bring {', '.join(names)}")


def _own_addresses() -> list[str]:
    import socket

    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    return [name, *sorted(str(address) for address in found if "%" not in str(address))]
