"""fedmtl server"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Settings, complete_run
from fedmtl.cli.progress import make_display
from fedmtl.cli.run import load, repaired
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.runs import find_run

DEFAULT = "127.0.0.1:9092"


def server(
    config: Annotated[Path | None, typer.Option(help="YAML file; without one, the demonstration's.")] = None,
    set: Settings = None,
    listen: Annotated[
        str | None, typer.Option(help=f"HOST:PORT to listen on; {DEFAULT} unless given.", metavar="HOST:PORT")
    ] = None,
    certs: Annotated[
        Path | None, typer.Option(help="Folder of `fedmtl certs init`; needed for any address but loopback.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name; a taken one gets -2, -3, ...")] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with this run after its last whole round.", autocompletion=complete_run),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="With --resume: leave out lines of events.jsonl that cannot be read.")
    ] = False,
) -> None:
    """Lead a run whose clients are sites on other machines (`fedmtl client`)."""
    needs_flower()
    from fedmtl.engines.flower.addresses import parse_address

    if resume is not None and (config is not None or set or name is not None):
        raise ConfigError("--resume: takes no config, --set or --name; the run goes on with the config in its folder")
    if repair and resume is None:
        raise ConfigError("--repair: mends a run that was begun; name it with --resume")
    display = make_display()
    if resume is None:
        address = parse_address(listen or DEFAULT, "--listen")
        check_protection(address.host, certs, "--listen", "--certs DIR (`fedmtl certs init DIR` makes it)")
        loaded = load(config, set or [])
        with display:
            from fedmtl.experiment.serve import Place, serve_run

            done = serve_run(loaded, name or (config.stem if config else "demo"), Place(address, certs), display)
    else:
        found = find_run(resume)
        if repair:
            repaired(found, display)
        with display:
            from fedmtl.experiment.serve import Place, remembered_place, resume_served

            place = remembered_place(found)
            if listen is not None or certs is not None:
                address = place.address if listen is None else parse_address(listen, "--listen")
                place = Place(address, certs or place.certs)
            check_protection(place.address.host, place.certs, "--listen", "--certs DIR")
            display.name = found.name
            done = resume_served(found, place, display, repair=repair)
    display.finish(done)


def check_protection(host: str, keys: Path | None, option: str, remedy: str) -> None:
    """Text's updates do not travel in the open: any address but this machine's own needs certificates and keys."""
    from fedmtl.engines.flower.addresses import is_loopback

    if keys is None and not is_loopback(host):
        raise FedmtlError(f"{option}: {host} is not this machine's loopback, and needs TLS and keys; give {remedy}")


def needs_flower() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise FedmtlError("flwr is not installed; install it with `pip install fedmtl[flower]`")
