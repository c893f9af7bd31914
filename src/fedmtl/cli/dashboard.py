"""fedmtl dashboard, and the page beside a run or a server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.terminal import write
from fedmtl.errors import FedmtlError

DEFAULT = "127.0.0.1:8080"
# The last events reach an open page before it ends with its run.
LAST_SECONDS = 1.0
READY = "dashboard: "

Beside = Annotated[
    str | None,
    typer.Option(
        "--dashboard",
        help=f"Show the runs as a page while this one lasts, on this machine's loopback; {DEFAULT} unless given.",
        metavar="[HOST:PORT]",
    ),
]


def with_address(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line with an address behind every `--dashboard` that has none."""
    found: list[str] = []
    for number, argument in enumerate(arguments, start=1):
        found.append(argument)
        # Typer has no options whose value may be left out.
        if argument == "--dashboard" and not re.fullmatch(r"[^\s=]+:\d+", "".join(arguments[number : number + 1])):
            found.append(DEFAULT)
    return found


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs, runs or studies; `runs` unless given.", metavar="[RUNS]..."),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to listen on; port 0 is any that is free.", metavar="HOST:PORT")
    ] = DEFAULT,
    token: Annotated[
        Path | None, typer.Option(help="File with the token that opens the page; needed beyond loopback.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="The page's certificate for TLS, as PEM; needed beyond loopback.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The private key of --certificate, as PEM.")] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Refused: the page only reads, and has no actions.")
    ] = False,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
) -> None:
    """Show run folders as a local web page that follows them as they grow; it only reads."""
    if allow_actions:
        raise FedmtlError(
            "--allow-actions: the page only reads; pause a run with Ctrl-C (`--resume` goes on), and remove a site"
            " with `fedmtl unenroll`"
        )
    from fedmtl.predict.onnx import require

    require("dashboard", "starlette", "uvicorn", "httptools", extra="serve")
    host, port = host_and_port(listen, "--listen")
    folders = runs or [Path("runs")]
    for folder in folders:
        if not beside and not folder.is_dir():
            raise FedmtlError(f"{folder}: no such folder; name folders of runs, runs or studies")
    from fedmtl.dashboard import server
    from fedmtl.predict.serve import listen as listening_socket

    protection = None
    if token is not None or certificate is not None or key is not None:
        if token is None or certificate is None or key is None:
            raise FedmtlError("--token, --certificate and --key: one is missing; give all three, or none on loopback")
        protection = server.Protection(server.read_token(token), certificate, key)
    server.check_address(host, protection)
    with closing(listening_socket(host, port, "dashboard", "give another HOST:PORT of this machine")) as listening:
        shown = f"[{host}]" if ":" in host else host
        address = f"{'http' if protection is None else 'https'}://{shown}:{listening.getsockname()[1]}"
        if beside:
            threading.Thread(target=_end_with_parent, daemon=True).start()
        server.serve(folders, listening, host, protection, lambda: _ready(address, beside))
    if not beside:
        write("stopped")


def _ready(address: str, beside: bool) -> None:
    if beside:
        print(f"{READY}{address}", flush=True)
    else:
        write(f"{READY}{address}; Ctrl-C ends it")


def _end_with_parent() -> None:
    """Wait for the command beside which this runs to end, however it ends."""
    sys.stdin.buffer.read()
    time.sleep(LAST_SECONDS)
    signal.raise_signal(signal.SIGTERM)


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """The parts of HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise FedmtlError(f"{option}: found {text}, write HOST:PORT, such as {DEFAULT}")
    return host.strip("[]"), int(port)


def check_beside(address: str | None) -> None:
    """Raise where `--dashboard` names an address that others may reach, before anything is loaded."""
    if address is None:
        return
    from fedmtl.predict.onnx import require

    require("--dashboard", "starlette", "uvicorn", "httptools", extra="serve")
    from fedmtl.predict.serve import is_loopback

    host, _ = host_and_port(address, "--dashboard")
    if not is_loopback(host):
        raise FedmtlError(
            f"--dashboard: {host} is not this machine's loopback; start `fedmtl dashboard --listen {address}` with"
            " --token, --certificate and --key beside it"
        )


@contextmanager
def page_beside(output: Path, address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Show the folder of runs as a page for as long as the block lasts, in a process that ends with this one."""
    if address is None:
        yield
        return
    command = [sys.executable, "-m", "fedmtl", "dashboard", str(output), "--listen", address, "--beside"]
    # In another session of the terminal: Ctrl-C is for the run, whose end the page still shows.
    page = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert page.stdin is not None
    assert page.stdout is not None
    try:
        said = []
        for line in page.stdout:
            said.append(line.strip())
            if line.startswith(READY):
                break
        else:
            raise FedmtlError((said or ["--dashboard: the page did not start"])[-1].removeprefix("error: "))
        say(said[-1])
        yield
    finally:
        with suppress(OSError):
            page.stdin.close()
        try:
            page.wait(LAST_SECONDS + 5)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        page.stdout.close()
