"""The table of commands, and what happens to their errors."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated

import typer

from fedmtl import __version__
from fedmtl.cli.certs import certs, enroll, enrolled, unenroll
from fedmtl.cli.compress import distill, prune, quantize
from fedmtl.cli.deploy import client, server
from fedmtl.cli.export import export
from fedmtl.cli.inspect import compare, config, report, status, tasks
from fedmtl.cli.measure import measure
from fedmtl.cli.policy import audit, policy
from fedmtl.cli.predict import evaluate, predict
from fedmtl.cli.pretrain import pretrain
from fedmtl.cli.run import run
from fedmtl.cli.study import study
from fedmtl.cli.terminal import make_terminal, write
from fedmtl.errors import FedmtlError

INTERRUPTED = 130

app = typer.Typer(
    name="fedmtl",
    help="Federated multi-task learning for text: one shared encoder, one head per task, many owners of data.",
    pretty_exceptions_enable=False,
)
for command in (
    run,
    evaluate,
    predict,
    compare,
    export,
    report,
    tasks,
    config,
    pretrain,
    server,
    client,
    enroll,
    unenroll,
    enrolled,
    status,
    distill,
    prune,
    quantize,
    measure,
):
    app.command()(command)
app.add_typer(study)
app.add_typer(certs)
app.add_typer(policy)
app.add_typer(audit)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        write(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        write(context.get_help())


def main() -> None:
    """Run the command line; an error is one line on stderr and its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Wherever it stands: who adds it to a command that failed adds it at the end.
    arguments = [argument for argument in sys.argv[1:] if argument != "--traceback"]
    wants_traceback = len(arguments) < len(sys.argv) - 1
    try:
        code = app(arguments, standalone_mode=False) or 0
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        if wants_traceback:
            for line in traceback.format_exc().splitlines():
                make_terminal(stderr=True).print(line, soft_wrap=True)
        message, code = told
        _complain(message)
    else:
        if code == INTERRUPTED:
            _complain("interrupted")
    sys.exit(code)


def _told(error: Exception) -> tuple[str, int] | None:
    """What a user is told of an error, and the exit code; None is a mistake of ours."""
    if isinstance(error, FedmtlError):
        return " ".join(str(error).split()), error.exit_code
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{place}no space left on the disk; free some, then go on with `fedmtl run --resume NAME`", 2
        return f"{place}{error.strerror or error}; check the path and your rights to it", 2
    # Typer's own, which it keeps in another place from one version to the next: an unknown option, a missing argument.
    if not hasattr(error, "format_message"):
        return None
    message, context = error.format_message(), getattr(error, "ctx", None)
    help_command = f"{context.command_path if context else 'fedmtl'} --help"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else ';'} see `{help_command}`", 2


def _complain(message: str) -> None:
    make_terminal(stderr=True).print(f"error: {message}", markup=False, soft_wrap=True)
