"""fedmtl run"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.arguments import ConfigFile, Settings, complete_run
from fedmtl.cli.dashboard import Beside, check_beside, page_beside
from fedmtl.cli.progress import Display, Quiet, Verbose, detail_of, make_display
from fedmtl.cli.terminal import write
from fedmtl.errors import ConfigError, FedmtlError, needs_extra
from fedmtl.runs.folder import RunFolder, find_run, locked

if TYPE_CHECKING:
    from fedmtl.config import Config
    from fedmtl.config.file import Explained
    from fedmtl.experiment.run import OpenEngine


class Engine(Enum):
    """What carries the jobs of a run on this machine."""

    local = "local"
    flower = "flower"


def run(
    config: ConfigFile = None,
    set: Settings = None,
    name: Annotated[str | None, typer.Option(help="The run's name; a taken one gets -2, -3, ...")] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with this run after its last whole round.", autocompletion=complete_run),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="With --resume: leave out lines of events.jsonl that cannot be read.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="Our own worker processes, or Flower's simulation (Ray): the same weights.")
    ] = Engine.local,
    profile: Annotated[
        bool, typer.Option("--profile", help="Tell where every round's seconds went, and store it with the events.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the results; the lines go to stderr.")
    ] = False,
    dashboard: Beside = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Train: one shared encoder, one head per task, over clients that keep their text."""
    if resume is not None and (config is not None or set or name is not None):
        raise ConfigError("--resume: takes no config, --set or --name; the run goes on with the config in its folder")
    if repair and resume is None:
        raise ConfigError("--repair: mends a run that was begun; name it with --resume")
    check_beside(dashboard)
    display = make_display(detail_of(verbose, quiet), stderr=json_)
    if resume is None:
        done = _start(config, set or [], name, display, profile, engine, dashboard)
    else:
        found = find_run(resume)
        with page_beside(found.path.parent, dashboard, display.say):
            done = _resume(found, display, profile, engine, repair)
    display.finish(done)
    if json_:
        from fedmtl.runs.log import read_events
        from fedmtl.runs.summary import summarize
        from fedmtl.runs.verdicts import verdicts

        events = read_events(done)
        said = [{"code": one.code, "task": one.task, "words": one.words} for one in verdicts(events, done.name)]
        write(json.dumps({**summarize(events, done.name).to_json(), "verdicts": said}))


def _start(
    path: Path | None,
    overrides: list[str],
    name: str | None,
    display: Display,
    profile: bool,
    engine: Engine,
    dashboard: str | None,
) -> RunFolder:
    explained = load_explained(path, overrides, "run" if engine is Engine.local else "run --engine flower")
    _warm_up(explained.config)
    with page_beside(Path(explained.config.output), dashboard, display.say), display:
        with loading():
            from fedmtl.experiment.prepare import settled
            from fedmtl.experiment.run import start_run

        explained, data = settled(explained)
        say_chosen(explained, display)
        name = name or (path.stem if path else "demo")
        return start_run(explained.config, name, display, profile=profile, make_engine=_opener(engine), data=data)


class EndedEarly(FedmtlError):
    """Ctrl-C or SIGTERM came before a run had begun."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name} before the run began")
        self.exit_code = 128 + number


@contextmanager
def loading() -> Iterator[None]:
    """Import libraries of compiled code inside this block: a signal waits for its end.

    An exception in the middle of their start ends the process by an abort, with a core instead of a line.
    """
    from fedmtl.engines.processes import raised

    with raised(EndedEarly) as signals, signals.postponed():
        yield


def _opener(engine: Engine) -> OpenEngine:
    from fedmtl.experiment.prepare import open_engine

    if engine is Engine.local:
        return open_engine
    from importlib.util import find_spec

    for package in ("flwr", "ray"):
        if find_spec(package) is None:
            raise ConfigError(needs_extra("--engine flower", package, "simulation"))
    from fedmtl.experiment.simulate import open_simulation

    return open_simulation


def repaired(run: RunFolder, display: Display) -> None:
    """Leave out the lines of a run's events that cannot be read, and say which."""
    from fedmtl.runs.log import repair_events

    with locked(run.path):
        broken = repair_events(run)
    if broken:
        lines = ", ".join(map(str, broken[:8])) + (f" and {len(broken) - 8} more" if len(broken) > 8 else "")
        display.say(f"left out of {run.events}: line {lines}; the file as it was is beside it")


def _resume(found: RunFolder, display: Display, profile: bool, engine: Engine, repair: bool) -> RunFolder:
    from fedmtl.runs.log import read_events
    from fedmtl.runs.summary import summarize

    if repair:
        repaired(found, display)
    summary = summarize(read_events(found), found.name)
    if summary.status == "done" and found.report.exists():
        display.say(
            f"{found.name} is finished, there is nothing to resume; to train longer, start a new run:"
            f" `fedmtl run {found.config} --set training.num_rounds={2 * max(1, summary.rounds)}`"
        )
        return found
    _warm_up(load(found.config, [], "run"))
    with display:
        with loading():
            from fedmtl.experiment.run import resume_run

        display.name = found.name
        return resume_run(found, display, profile=profile, make_engine=_opener(engine), repair=repair)


def _warm_up(config: Config) -> None:
    """Start the workers' imports before ours, so that both go on side by side."""
    from fedmtl.engines.processes import warm_up
    from fedmtl.engines.start_up import expects_workers, worker_imports

    if expects_workers(config.compute):
        warm_up(worker_imports(config))


def load(path: Path | None, overrides: list[str], command: str) -> Config:
    """The config of a file, or the packaged demonstration's, with overrides; the command honours all of them."""
    return load_explained(path, overrides, command).config


def load_explained(path: Path | None, overrides: list[str], command: str) -> Explained:
    """As `load`, with where every value comes from."""
    from fedmtl.config.file import explained_config, explained_demo
    from fedmtl.config.honoured import COMMANDS

    COMMANDS[command].check(overrides)
    loaded = explained_demo(overrides) if path is None else explained_config(path, overrides)
    COMMANDS[command].check_file(loaded.config)
    return loaded


def say_chosen(explained: Explained, display: Display) -> None:
    """Print the chosen settings that matter, in one line, where any were chosen."""
    from fedmtl.config.auto import chosen_line

    line = chosen_line(explained.choices)
    if line is not None:
        display.say(line)
