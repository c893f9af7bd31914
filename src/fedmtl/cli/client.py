"""fedmtl client"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.server import DEFAULT, check_protection, needs_flower
from fedmtl.cli.terminal import make_terminal
from fedmtl.errors import FedmtlError


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
            " <task>/train.tsv.gz; without it, those that the server's config deals to this client.",
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
) -> None:
    """Take part in a run as a site; its text stays here."""
    needs_flower()
    from fedmtl.engines.flower.addresses import parse_address
    from fedmtl.engines.flower.certificates import read_private_key
    from fedmtl.engines.flower.line import SiteKeys
    from fedmtl.experiment.join import join_run
    from fedmtl.experiment.site_worker import SiteSettings

    address = parse_address(server, "--server")
    check_protection(address.host, ca and key, "--server", "--ca ca.crt and --key NAME.key")
    if (ca is None) != (key is None):
        raise FedmtlError("--ca and --key: one is missing; the server's ca.crt and this site's NAME.key go together")
    if ca is not None and not ca.is_file():
        raise FedmtlError(f"{ca}: no such file; copy the server's ca.crt here")
    names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    files, root = own_data(data or [], names)
    place = folder or Path("sites") / client_id
    settings = SiteSettings(client_id, names, place, place / "spool", files, root, model, device)
    keys = None if ca is None or key is None else SiteKeys(read_private_key(key), ca)
    terminal = make_terminal()
    join_run(settings, address, keys, lambda line: terminal.print(f"{client_id}: {line}", markup=False))


def own_data(data: list[str], tasks: tuple[str, ...]) -> tuple[dict[str, str], str | None]:
    """The site's files per task, or the folder of the built-in tasks."""
    files: dict[str, str] = {}
    root: str | None = None
    for entry in data:
        task, equals, path = entry.rpartition("=")
        if not Path(path).exists():
            raise FedmtlError(f"--data: {path}: no such file or folder")
        absolute = str(Path(path).absolute())
        if equals:
            files[task] = absolute
        elif Path(path).is_dir():
            root = absolute
        elif len(tasks) == 1:
            files[tasks[0]] = absolute
        else:
            raise FedmtlError(f"--data: {path} is of which task? write TASK={path}")
    for task in files:
        if task not in tasks:
            raise FedmtlError(f"--data: found a file for {task}; --tasks has {', '.join(tasks)}")
    return files, root
