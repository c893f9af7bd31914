"""The table of commands, and what happens to their errors."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_name

from fedmtl import __version__
from fedmtl.cli.certs import certs, enroll, enrolled, unenroll
from fedmtl.cli.check import check
from fedmtl.cli.compress import distill, prune, quantize
from fedmtl.cli.dashboard import dashboard, with_address
from fedmtl.cli.data import data
from fedmtl.cli.deploy import client, flower, server
from fedmtl.cli.doctor import doctor
from fedmtl.cli.export import export
from fedmtl.cli.inspect import compare, config, report, status, tasks
from fedmtl.cli.measure import measure
from fedmtl.cli.policy import audit, policy
from fedmtl.cli.predict import evaluate, predict
from fedmtl.cli.pretrain import pretrain
from fedmtl.cli.run import run
from fedmtl.cli.serve import serve
from fedmtl.cli.terminal import make_terminal, write
from fedmtl.cli.track import track
from fedmtl.errors import FedmtlError

INTERRUPTED = 130
# Installed packages add commands by entry points in this group, each a typer.Typer.
GROUP = "fedmtl.commands"
# Ships with fedmtl, so that it is there also where the metadata is older than the code.
SHIPPED = EntryPoint("study", "fedmtl_studies.cli:study", GROUP)


class Commands(TyperGroup):
    """The commands of fedmtl, and those of installed packages, which are looked up when no other command will do."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, cmd_name)

    def _add_installed(self) -> None:
        for name, group in installed_groups().items():
            self.commands.setdefault(name, typer.main.get_group(group))


def installed_groups() -> dict[str, typer.Typer]:
    """Return the groups of commands that packages add; one that cannot be loaded says so when it is called."""
    found = {SHIPPED.name: SHIPPED} if find_spec(SHIPPED.module.partition(".")[0]) else {}
    found |= {entry.name: entry for entry in entry_points(group=GROUP)}
    return {name: _load(entry) for name, entry in found.items()}


def _load(entry: EntryPoint) -> typer.Typer:
    try:
        loaded = entry.load()
        if not isinstance(loaded, typer.Typer):
            raise TypeError(f"{entry.value} is no typer.Typer")
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        return loaded
    broken = typer.Typer(name=entry.name, help="Cannot be loaded.", add_completion=False)

    @broken.callback(invoke_without_command=True)
    def refuse() -> None:
        raise FedmtlError(f"the command {entry.name} ({entry.value}) cannot be loaded: {reason}; update its package")

    return broken


app = typer.Typer(
    name="fedmtl",
    cls=Commands,
    help="Federated multi-task learning for text: one shared encoder, one head per task, many owners of data.",
    pretty_exceptions_enable=False,
)
for command in (
    run,
    evaluate,
    predict,
    serve,
    dashboard,
    compare,
    export,
    report,
    tasks,
    check,
    config,
    doctor,
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
    track,
):
    app.command()(command)
app.add_typer(certs)
app.add_typer(data)
app.add_typer(policy)
app.add_typer(audit)
app.add_typer(flower)


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
        arguments = with_address(arguments)
        code = _app_of(arguments)(arguments, standalone_mode=False) or 0
    except Exception as error:
        known = _explain(error)
        if known is None:
            raise
        if wants_traceback:
            for line in traceback.format_exc().splitlines():
                make_terminal(stderr=True).print(line, soft_wrap=True)
        message, code = known
        _complain(message)
    else:
        if code == INTERRUPTED:
            _complain("interrupted")
    sys.exit(code)


def _app_of(arguments: list[str]) -> typer.Typer:
    """The command that the first argument names by itself, as making all of them takes longer than an answer.

    Otherwise it is the whole table, which also knows what to say of a name that is no command.
    """
    known = {get_command_name(str(getattr(info.callback, "__name__", ""))): info for info in app.registered_commands}
    found = known.get(arguments[0]) if arguments else None
    if found is None:
        return app
    alone = typer.Typer(name=app.info.name, cls=Commands, help=app.info.help, pretty_exceptions_enable=False)
    alone.registered_commands, alone.registered_callback = [found], app.registered_callback
    return alone


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the message for a user and the exit code; None stands for a mistake of ours."""
    if isinstance(error, FedmtlError):
        return " ".join(str(error).split()), error.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{where}no space left on the disk; free some, then go on with `fedmtl run --resume NAME`", 2
        return f"{where}{error.strerror or error}; check the path and your rights to it", 2
    # An error of Typer, whose module differs from one version to the next: an unknown option, a missing argument.
    if not hasattr(error, "format_message"):
        return None
    message, context = error.format_message(), getattr(error, "ctx", None)
    help_command = f"{context.command_path if context else 'fedmtl'} --help"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else ';'} see `{help_command}`", 2


def _complain(message: str) -> None:
    make_terminal(stderr=True).print(f"error: {message}", markup=False, soft_wrap=True)
