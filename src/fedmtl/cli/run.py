"""fedmtl run"""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmtl.cli.progress import make_display
from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.runs import RunFolder, find_run, read_events


def run(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file; without one, a demonstration on embedded data.", metavar="[CONFIG]"),
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace one setting, such as training.num_rounds=5.", metavar="KEY=VALUE"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name; a taken one gets -2, -3, ...")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run after its last whole round.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object with the results last.")] = False,
) -> None:
    """Train: one shared encoder, one head per task, over clients that keep their text."""
    if resume is not None and (config is not None or set or name is not None):
        raise ConfigError("--resume: takes no config, --set or --name; the run goes on with the config in its folder")
    display = make_display(quiet=json_)
    with display:
        done = _resume(resume, display) if resume is not None else _start(config, set or [], name, display)
    display.finish(done)
    if json_:
        from fedmtl.run_summary import summarize

        print(json.dumps(summarize(read_events(done), done.name).to_json()))


def _start(path: Path | None, overrides: list[str], name: str | None, display: Any) -> RunFolder:
    loaded = load(path, overrides)
    from fedmtl.experiment.run import start_run

    return start_run(loaded, name or (path.stem if path else "demo"), display)


def _resume(name: str, display: Any) -> RunFolder:
    found = find_run(name)
    from fedmtl.experiment.run import resume_run

    return resume_run(found, display)


def load(path: Path | None, overrides: list[str]) -> Config:
    """The config of a file, or the packaged demonstration's, with overrides."""
    from fedmtl.config.file import load_config

    if path is not None:
        return load_config(path, overrides)
    with as_file(files("fedmtl") / "demo.yaml") as demo:
        return load_config(demo, overrides)
