"""The table of commands, and what happens to their errors."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer
from rich.console import Console

from fedmtl import __version__
from fedmtl.cli.compare import compare
from fedmtl.cli.config import config
from fedmtl.cli.evaluate import evaluate
from fedmtl.cli.export import export
from fedmtl.cli.predict import predict
from fedmtl.cli.report import report
from fedmtl.cli.run import run
from fedmtl.cli.tasks import tasks
from fedmtl.errors import FedmtlError

app = typer.Typer(
    name="fedmtl",
    help="Federated multi-task learning for text: one shared encoder, one head per task, many owners of data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (run, evaluate, predict, compare, export, report, tasks, config):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        app()
    except FedmtlError as error:
        if "--traceback" in sys.argv:
            traceback.print_exc()
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read our output, such as `head`, has had enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
