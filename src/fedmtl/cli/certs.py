"""fedmtl certs, fedmtl enroll, fedmtl unenroll, fedmtl enrolled"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.arguments import Json
from fedmtl.cli.deploy import needs_flower
from fedmtl.cli.terminal import show, write
from fedmtl.errors import FedmtlError

PASSPHRASE = "FEDMTL_CA_PASSPHRASE"

certs = typer.Typer(name="certs", help="Certificates and keys of a run between machines.", no_args_is_help=True)

Host = Annotated[
    list[str] | None,
    typer.Option(help="A name or address at which sites reach the server; loopback is always among them."),
]
CaDir = Annotated[
    Path | None,
    typer.Option(
        "--ca-dir", help="Where the authority's key lies, if not in DIR; no server needs it to run.", metavar="DIR"
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help=f"A file with the passphrase of the authority's key; or set {PASSPHRASE}.",
        metavar="FILE",
    ),
]
Certs = Annotated[Path, typer.Option(help="The server's folder of `fedmtl certs init`.", metavar="DIR")]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]


@certs.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to put them.", metavar="DIR")],
    host: Host = None,
    ca_dir: CaDir = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make a certificate authority and the server's certificate, which lives 397 days."""
    needs_flower("fedmtl certs init")
    from fedmtl.engines.flower.certificates import end_of, make_authority

    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", *(host or _local_addresses())])
    made = make_authority(folder, list(hosts), _passphrase(passphrase_file), ca_dir)
    write(
        f"{folder}: server certificate for {', '.join(hosts)}, until {end_of(made[2]):%Y-%m-%d};"
        f" sites need {made[0]}, and nobody else needs {made[1]}"
    )


@certs.command()
def renew(
    folder: Annotated[Path, typer.Argument(help="The folder of `fedmtl certs init`.", metavar="DIR")],
    host: Host = None,
    ca_dir: CaDir = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make a new server certificate of the same authority; sites need nothing new, and a running server takes it up."""
    needs_flower("fedmtl certs renew")
    from fedmtl.engines.flower.certificates import CERTIFICATE, end_of
    from fedmtl.engines.flower.certificates import renew as renew_certificate

    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", *host]) if host else ()
    names = renew_certificate(folder, list(hosts), _passphrase(passphrase_file), ca_dir)
    write(f"{folder}: server certificate for {', '.join(names)}, until {end_of(folder / CERTIFICATE):%Y-%m-%d}")


@certs.command()
def node(
    name: SiteName,
    folder: Annotated[Path, typer.Option(help="Where to put its key.")] = Path(),
) -> None:
    """Make a site's key; run it at the site, and send NAME.pub to the server's keeper."""
    needs_flower("fedmtl certs node")
    from fedmtl.engines.flower.certificates import fingerprint, make_node_key

    private, public = make_node_key(name, folder)
    write(f"{private} stays here; enrol {public} at the server (fingerprint {fingerprint(public.read_text())})")


def enroll(
    name: SiteName,
    key: Annotated[Path, typer.Option(help="The site's NAME.pub.")],
    tasks: Annotated[str, typer.Option(help="The tasks it may bring, with commas between.")],
    certs: Certs = Path("certs"),
    examples: Annotated[
        list[str] | None,
        typer.Option(help="The most examples it counts for: N of each task, or TASK=N.", metavar="N"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The run's YAML file; a task that it lacks is an error.", metavar="FILE")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Change the entry of a site that is enrolled.")] = False,
) -> None:
    """Let a site join, and say for which tasks; a running server follows."""
    needs_flower("fedmtl enroll")
    from fedmtl.engines.flower.enrolment import enroll as enter

    _check_folder(certs)
    if not key.is_file():
        raise FedmtlError(f"{key}: no such file; the site makes it with `fedmtl certs node {name}`")
    names = [task.strip() for task in tasks.split(",") if task.strip()]
    if config is not None:
        _check_tasks(names, config)
    before, entry = enter(certs, name, key.read_bytes(), names, _bounds(examples or [], names), replace=replace)
    if before is not None and before != entry:
        write(f"{name} was: {before.words()}")
    write(f"{name} may bring {', '.join(names)} ({entry.words()})")


def unenroll(name: SiteName, certs: Certs = Path("certs")) -> None:
    """Strike a site off: a running server stops serving it at once, and its open job does not count."""
    needs_flower("fedmtl unenroll")
    from fedmtl.engines.flower.enrolment import unenroll as strike_off

    _check_folder(certs)
    entry = strike_off(certs, name)
    write(f"{name} is not enrolled any more (was: {entry.words()})")


def enrolled(certs: Certs = Path("certs"), json_: Json = False) -> None:
    """List the enrolled sites: their tasks, how many examples they count for at most, and their keys' fingerprints."""
    needs_flower("fedmtl enrolled")
    from rich.table import Table

    from fedmtl.engines.flower.certificates import fingerprint
    from fedmtl.engines.flower.enrolment import EVERY, read_book

    _check_folder(certs)
    book = read_book(certs)
    if json_:
        write(
            json.dumps(
                {
                    name: {
                        "tasks": list(entry.tasks),
                        "examples": {task: entry.most_examples(task) for task in entry.tasks},
                        "fingerprint": fingerprint(entry.key),
                    }
                    for name, entry in sorted(book.items())
                }
            )
        )
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("site", "tasks", "examples at most", "fingerprint"):
        table.add_column(column)
    for name, entry in sorted(book.items()):
        most = ", ".join(str(n) if task == EVERY else f"{task}={n}" for task, n in entry.examples.items())
        table.add_row(name, ", ".join(entry.tasks), most or "not bounded", fingerprint(entry.key))
    show(table, [f"{len(book)} enrolled in {certs}"])


def _check_folder(certs: Path) -> None:
    from fedmtl.engines.flower.certificates import CA

    if not (certs / CA).is_file():
        raise FedmtlError(f"{certs}: has no {CA}; make it with `fedmtl certs init {certs}`, or give --certs")


def _check_tasks(names: list[str], config: Path) -> None:
    from fedmtl.config.errors import did_you_mean
    from fedmtl.config.file import load_config

    known = list(load_config(config, []).tasks)
    for name in names:
        if name not in known:
            raise FedmtlError(f"--tasks: {config} has no task {name!r:.80}; {did_you_mean(name, known)}")


def _bounds(examples: list[str], tasks: list[str]) -> dict[str, int]:
    from fedmtl.engines.flower.enrolment import EVERY

    found: dict[str, int] = {}
    for given in examples:
        task, equals, number = given.rpartition("=")
        if not number.isascii() or not number.isdigit() or not 0 < len(number) < 16 or int(number) == 0:
            raise FedmtlError(f"--examples: found {given!r:.80}; write a whole number above 0, or TASK=NUMBER")
        if equals and task not in tasks:
            raise FedmtlError(f"--examples: {task!r:.80} is not among --tasks {', '.join(tasks)}")
        found[task if equals else EVERY] = int(number)
    return found


def _passphrase(path: Path | None) -> bytes | None:
    if path is None:
        return os.environ[PASSPHRASE].encode() if os.environ.get(PASSPHRASE) else None
    try:
        content = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror})") from error
    if not content:
        raise FedmtlError(f"{path}: is empty; put the passphrase into it")
    return content


def _local_addresses() -> list[str]:
    import socket

    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    return [name, *sorted(str(address) for address in found if "%" not in str(address))]
