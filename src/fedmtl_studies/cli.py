"""`fedmtl study`: the group of commands, each made of a study's options, and what a person sees while cells run.

`fedmtl --help` imports this module and no study; `fedmtl study` imports the studies when it needs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from fedmtl.cli.arguments import ConfigFile, Settings
from fedmtl.cli.progress import make_display
from fedmtl.cli.run import load
from fedmtl.cli.tables import amount, duration, number
from fedmtl.cli.terminal import Terminal, make_terminal, show, write

if TYPE_CHECKING:
    from fedmtl_studies.grid import Outcome, Standing
    from fedmtl_studies.options import GridOptions, Option, StudyOptions
    from fedmtl_studies.study import Study
    from fedmtl_studies.wire import Pair, Point

Command = Callable[..., None]


class Studies(TyperGroup):
    """A group whose commands are made when one is wanted."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._add()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._add()
        return super().get_command(ctx, cmd_name)

    def _add(self) -> None:
        for name, function in {} if self.commands else commands().items():
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name)(function)
            self.commands[name] = typer.main.get_command(single)


study = typer.Typer(
    name="study", help="Many runs, as tables and pictures.", no_args_is_help=True, cls=Studies, add_completion=False
)


def commands() -> dict[str, Command]:
    """Return every command of the group by its name."""
    from fedmtl_studies import compression, federated, multitask, privacy, scaling

    grids: list[Study[Any, Any]] = [multitask.STUDY, compression.STUDY, federated.STUDY, scaling.STUDY, privacy.STUDY]
    return {"wire": wire, **{grid.name: make_command(grid) for grid in grids}}


def make_command(study: Study[Any, Any]) -> Command:
    """Return a function that typer takes for a command, with a parameter for every option of the study and its grid."""
    from fedmtl_studies.options import GridOptions

    def command(**given: Any) -> None:
        options = study.options(**dict(_values(study.options, given)))
        run_shown(study, options, GridOptions(**dict(_values(GridOptions, given))))

    parameters = [_parameter(*entry) for record in (study.options, GridOptions) for entry in _options(record)]
    command.__name__ = study.name
    command.__doc__ = study.help
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options(record: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, Option]]:
    from fedmtl_studies.options import Option

    for name, field in record.model_fields.items():
        option = next((part for part in field.metadata if isinstance(part, Option)), None)
        if option is not None:
            yield name, field, option


def _parameter(name: str, field: FieldInfo, option: Option) -> inspect.Parameter:
    kind, default = _command_line(name, field, option)
    described = typer.Option(option.flag, help=option.help, metavar=option.metavar, min=option.least)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, described],
    )


def _command_line(name: str, field: FieldInfo, option: Option) -> tuple[Any, Any]:
    """Return the type and the default that an option has on the command line."""
    kind = _without_none(field.annotation)
    default = field.default if option.has_default else None
    if option.read is not None:
        return option.kind, ",".join(map(str, default)) if isinstance(default, tuple) else default
    if kind is bool:
        return bool, False
    if get_origin(kind) is tuple:
        return list[str], None
    if get_origin(kind) is Literal:
        written = option.choices or get_args(kind)
        choices = Enum(name, {value.replace("-", "_"): value for value in written})  # type: ignore[misc]
        return choices, None if default is None else choices(default)
    return (option.kind if option.kind is not str else kind), default


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (UnionType, Union):
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    return kind


def _values(record: type[BaseModel], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read what typer gives into the fields of a record, but for options that were left out."""
    for name, field, option in _options(record):
        value = given[name]
        if value is None:
            continue
        if option.read is not None:
            yield name, option.read(value, option.flag)
        elif isinstance(value, bool):
            # The flag of a field that is True by default turns it off.
            yield name, value != bool(field.default)
        elif isinstance(value, list):
            yield name, tuple(value if option.each is None else map(option.each, value))
        else:
            yield name, value.value if isinstance(value, Enum) else value


def run_shown(study: Study[Any, Any], options: StudyOptions, grid: GridOptions) -> None:
    """Run a study in its folder in runs/, with its progress on the screen, and say where its pages are."""
    from fedmtl_studies.folder import open_study
    from fedmtl_studies.grid import suitable_at_once
    from fedmtl_studies.study import run_study

    folder = open_study(Path("runs"), grid.name or options.folder_name)
    with make_grid_display() as display:
        run_study(study, options, folder, grid.jobs or suitable_at_once(clients=1), display, grid.keep)
    write(f"{folder.page} and {folder.markdown}")


class GridLines:
    """A line for every cell that ended, with the time left for the whole grid."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.num_shown = 0

    def __enter__(self) -> GridLines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, standing: Standing) -> None:
        fresh = standing.outcomes[self.num_shown :]
        earlier = sum(outcome.status == "earlier" for outcome in fresh)
        if earlier:
            self.say(f"{earlier} of {standing.total} cells were finished before")
        for position, outcome in enumerate(fresh, start=self.num_shown + 1):
            if outcome.status != "earlier":
                self.say(_line(outcome, position, standing))
        self.num_shown = len(standing.outcomes)

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)


class GridDisplay(GridLines):
    """The same lines, with a bar of cells and the open ones that stay at the bottom."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=terminal)
        self.bar = self.progress.add_task("cells", total=None)
        self.live = Live(self.progress, console=terminal, refresh_per_second=2, transient=True)

    def __enter__(self) -> GridDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def __call__(self, standing: Standing) -> None:
        super().__call__(standing)
        self.progress.update(self.bar, total=standing.total, completed=len(standing.outcomes))
        self.live.update(self._view(standing))

    def _view(self, standing: Standing) -> RenderableType:
        running = ", ".join(f"{name} {share:.0%}" for name, share in standing.running.items())
        left = "" if standing.seconds_left is None else f"{duration(standing.seconds_left)} left; "
        return Group(self.progress, Text(f"{left}{running or 'starting'}"))


def make_grid_display() -> GridLines:
    """Return a live display in a terminal, lines elsewhere."""
    terminal = make_terminal()
    return GridDisplay(terminal) if terminal.is_terminal else GridLines(terminal)


def _line(outcome: Outcome, position: int, standing: Standing) -> str:
    left = "" if not standing.seconds_left else f", {duration(standing.seconds_left)} left"
    if outcome.status == "failed":
        return f"  {position} of {standing.total}: {outcome.cell} failed: {outcome.reason}"
    return f"  {position} of {standing.total}: {outcome.cell} in {duration(outcome.seconds)}{left}"


def wire(
    config: ConfigFile = None,
    set: Settings = None,
    codecs: Annotated[
        str, typer.Option(help="Codecs for both ways, or DOWN/UP, with commas between.")
    ] = "fp32,fp16,int8,int8/topk",
    name: Annotated[str | None, typer.Option(help="The study's name; a taken one gets -2, -3, ...")] = None,
) -> None:
    """Run a config once per codec, with the same seed: wire.csv and wire.html show score against bytes."""
    from fedmtl_studies.wire import HONOURS

    HONOURS.check(set or [])
    loaded = load(config, set or [], "run")
    display = make_display()
    with display:
        from fedmtl_studies.wire import last_points, parse_pairs, study_wire

        def observe(pair: Pair) -> Any:
            display.say(f"down {pair.down}, up {pair.up}")
            return display

        pairs = parse_pairs(codecs)
        folder, points = study_wire(loaded, pairs, name or f"{config.stem if config else 'demo'}-wire", observe)
    show(_wire_table(last_points(points)), [f"{folder / 'wire.csv'} and {folder / 'wire.html'}"])


def _wire_table(ends: list[Point]) -> Table:
    metrics = list(dict.fromkeys(metric for end in ends for metric in end.scores))
    table = Table(title="bytes are per update; scores are the last ones", title_justify="left")
    for column in ("codec", *metrics, "down", "up", "both"):
        is_name = column == "codec"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for end in ends:
        each = max(1, end.messages)
        sizes = (end.bytes_down / each, end.bytes_up / each, end.total_bytes / each)
        table.add_row(end.codec, *(number(end.scores.get(metric)) for metric in metrics), *map(amount, map(int, sizes)))
    return table
