"""fedmtl track"""

from __future__ import annotations

from typing import Annotated

import typer

from fedmtl.cli.arguments import Run
from fedmtl.cli.terminal import write
from fedmtl.errors import ConfigError


def track(
    run: Run,
    to: Annotated[str, typer.Option(help="tensorboard, mlflow, wandb or trackio.", metavar="NAME")],
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of the tracker, such as experiment=trial; others are those of the run's config.",
            metavar="KEY=VALUE",
        ),
    ] = None,
) -> None:
    """Send a run's numbers to a tracker: what it has now, and of that only what is not there yet."""
    from fedmtl.capabilities import missing_library, tracker_opener, tracker_options
    from fedmtl.config.file import load_config
    from fedmtl.config.yaml_text import parse_yaml
    from fedmtl.runs.folder import find_run
    from fedmtl.trackers.sender import send_once

    found = find_run(run)
    opener = tracker_opener(to)
    config = load_config(found.config)
    given = dict(config.track.get(to, {}))
    for each in option or []:
        key, equals, text = each.partition("=")
        if not equals:
            raise ConfigError(f"--option {each}: write `--option KEY=VALUE`, such as experiment=trial")
        given[key.strip()] = parse_yaml(text, where=f"--option {each}")
    options = tracker_options(config, to, given)
    missing = missing_library(to)
    if missing is not None:
        raise ConfigError(missing)
    number = send_once(found, to, options, opener)
    write(f"{found.name}: {number} rounds sent to {to}" if number else f"{found.name}: {to} has all of its rounds")
