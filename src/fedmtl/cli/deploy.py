"""fedmtl server, fedmtl client: a run goes over sites on other machines; fedmtl flower: as an app of Flower's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Settings, complete_run
from fedmtl.cli.dashboard import Beside, check_beside, page_beside
from fedmtl.cli.progress import Quiet, Verbose, detail_of, make_display
from fedmtl.cli.run import load_explained, loading, repaired, say_chosen
from fedmtl.cli.terminal import make_terminal, stamped, write
from fedmtl.errors import ConfigError, FedmtlError, needs_extra
from fedmtl.runs.folder import find_run

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
    dashboard: Beside = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Lead a run whose clients are sites on other machines (`fedmtl client`)."""
    needs_flower("fedmtl server")
    from fedmtl.engines.flower.addresses import parse_address

    if resume is not None and (config is not None or set or name is not None):
        raise ConfigError("--resume: takes no config, --set or --name; the run goes on with the config in its folder")
    if repair and resume is None:
        raise ConfigError("--repair: mends a run that was begun; name it with --resume")
    check_beside(dashboard)
    display = make_display(detail_of(verbose, quiet), has_times=True)
    if resume is None:
        address = parse_address(listen or DEFAULT, "--listen")
        check_protection(address.host, certs, "--listen", "--certs DIR (`fedmtl certs init DIR` makes it)")
        explained = load_explained(config, set or [], "server")
        with page_beside(Path(explained.config.output), dashboard, display.say), display:
            say_chosen(explained, display)
            with loading():
                from fedmtl.deploy.server import Endpoint, serve_run

            done = serve_run(
                explained.config, name or (config.stem if config else "demo"), Endpoint(address, certs), display
            )
    else:
        found = find_run(resume)
        if repair:
            repaired(found, display)
        with page_beside(found.path.parent, dashboard, display.say), display:
            with loading():
                from fedmtl.deploy.server import Endpoint, resume_served, saved_endpoint

            endpoint = saved_endpoint(found)
            if listen is not None or certs is not None:
                address = endpoint.address if listen is None else parse_address(listen, "--listen")
                endpoint = Endpoint(address, certs or endpoint.certs)
            check_protection(endpoint.address.host, endpoint.certs, "--listen", "--certs DIR")
            display.name = found.name
            done = resume_served(found, endpoint, display, repair=repair)
    display.finish(done)


def check_protection(host: str, keys: Path | None, option: str, remedy: str) -> None:
    """Raise unless TLS and keys protect an address other than loopback: updates do not travel in the open."""
    from fedmtl.engines.flower.addresses import is_loopback

    if keys is None and not is_loopback(host):
        raise FedmtlError(f"{option}: {host} is not this machine's loopback, and needs TLS and keys; give {remedy}")


def needs_flower(command: str = "this command") -> None:
    """Raise one line where the `flower` extra is missing, of which every command between machines uses a part."""
    from importlib.util import find_spec

    for package in ("flwr", "cryptography"):
        if find_spec(package) is None:
            raise FedmtlError(needs_extra(command, package, "flower"))


def client(
    client_id: Annotated[str, typer.Option("--client-id", help="This site's name, as the server knows it.")],
    tasks: Annotated[str, typer.Option(help="The tasks this site has examples of, with commas between.")],
    server: Annotated[str, typer.Option(help="Where the server listens.", metavar="HOST:PORT")] = DEFAULT,
    ca: Annotated[Path | None, typer.Option(help="The ca.crt of the server's `fedmtl certs init`.")] = None,
    key: Annotated[Path | None, typer.Option(help="This site's NAME.key of `fedmtl certs node`.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="This site's own examples: FILE for one task, TASK=FILE for each of several, or a folder of"
            " <task>/train.tsv.gz; without it, the package's own that the server's config deals to this client.",
            metavar="FILE",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The encoder here, where its folder is not the one in the server's config.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where this site keeps its own values; sites/NAME unless given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    policy: Annotated[
        Path | None,
        typer.Option(help="What the server may have of this site (`fedmtl policy init`); strict defaults without it."),
    ] = None,
    save_model: Annotated[
        Path | None,
        typer.Option(
            help="Where the finished model of this site's tasks is saved, checked by its hash; `predict`, `evaluate`"
            " and `export` take the folder.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Take part in a run as a site; its text stays here."""
    needs_flower("fedmtl client")
    if save_model is not None and save_model.exists():
        raise FedmtlError(f"--save-model: {save_model} is there already; name a folder that is not")
    from fedmtl.deploy.site import join_run
    from fedmtl.deploy.site_worker import describe_site
    from fedmtl.engines.flower.addresses import parse_address
    from fedmtl.engines.flower.certificates import read_private_key
    from fedmtl.engines.flower.line import SiteKeys

    address = parse_address(server, "--server")
    check_protection(address.host, ca and key, "--server", "--ca ca.crt and --key NAME.key")
    if (ca is None) != (key is None):
        raise FedmtlError("--ca and --key: one is missing; the server's ca.crt and this site's NAME.key go together")
    if ca is not None and not ca.is_file():
        raise FedmtlError(f"{ca}: no such file; copy the server's ca.crt here")
    settings = describe_site(
        client_id, tasks, data or [], policy, folder=folder, model=model, device=device, save_model=save_model, key=key
    )
    keys = None if ca is None or key is None else SiteKeys(read_private_key(key), ca)
    terminal = make_terminal()
    join_run(settings, address, keys, lambda line: terminal.print(stamped(f"{client_id}: {line}"), markup=False))


flower = typer.Typer(name="flower", help="A run as an app on Flower's SuperLink.", no_args_is_help=True)


@flower.callback()
def only_commands() -> None:
    """A run as an app on Flower's SuperLink."""


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to write.", metavar="DIR")],
    config: Annotated[Path | None, typer.Option(help="YAML file; without one, the demonstration's.")] = None,
) -> None:
    """Write a Flower app whose server and sites are fedmtl's, for `flwr run`."""
    needs_flower("fedmtl flower")
    from fedmtl.deploy.flower_project import write_project

    clients = write_project(folder, config)
    write(f"{folder}: a Flower app of {len(clients)} clients; its README.md has the commands")
