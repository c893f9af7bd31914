"""fedmtl serve"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer

from fedmtl.cli.arguments import Client, Model, Round, onnx_path
from fedmtl.cli.terminal import write
from fedmtl.errors import FedmtlError

MOST_PORT = 65_535


def serve(
    run: Model,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=MOST_PORT, help="The port; 0 is any that is free.")] = 8000,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with; otherwise all cores but one, for the requests.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=1000, help="Milliseconds that a request waits for others to share a pass.")
    ] = 2.0,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Texts to compute together.")] = 32,
    queue: Annotated[int, typer.Option(min=1, help="Texts that may wait; more get status 503.")] = 1024,
    texts: Annotated[int, typer.Option(min=1, max=10_000, help="Texts of one request.")] = 64,
    characters: Annotated[int, typer.Option(min=1, help="Characters of one text.")] = 20_000,
    body: Annotated[int, typer.Option(min=1, help="Kilobytes of one request.")] = 1024,
    client: Client = None,
    round: Round = None,
) -> None:
    """Answer over HTTP with every head: POST /predict, a page to try it at /, OpenAPI, health and metrics."""
    from fedmtl.predict.onnx import require

    require("serve", "starlette", "uvicorn", extra="serve")
    if texts > queue:
        raise FedmtlError(f"--queue {queue}: a request of --texts {texts} would never fit; give at least as many")
    onnx = onnx_path(run, client, round)
    from fedmtl.predict import serve as service

    limits = service.Limits(1024 * body, texts, characters, queue, batch, wait / 1000)
    # Before the model is loaded: whoever named a wrong port learns it at once.
    with closing(service.listen(host, port)) as listening:
        served = service.open_served(run, onnx, client, round, threads or max(1, len(os.sched_getaffinity(0)) - 1))
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        if not service.is_loopback(host):
            write(f"warning: {host} is open to others, without accounts and TLS; put a proxy with both before it")

        def ready() -> None:
            write(f"{served.name} ({served.backend}: {', '.join(served.tasks)}) answers at {address}; Ctrl-C ends it")

        service.serve(served, limits, listening, host, ready)
    write("stopped")
