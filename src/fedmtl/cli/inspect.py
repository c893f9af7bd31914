"""fedmtl tasks, config, status, compare, report: commands that read and print, and train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedmtl import api
from fedmtl.cli.arguments import Json, Run, Settings, complete_run
from fedmtl.cli.tables import amount, comparison_tables, duration
from fedmtl.cli.terminal import make_terminal, show, write
from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import RunFolder, find_run, is_busy

if TYPE_CHECKING:
    from fedmtl.config.file import Explained
    from fedmtl.runs.summary import RunStatus

# So many missing sites are named.
MOST_NAMED = 10


def tasks() -> None:
    """List the built-in tasks."""
    from fedmtl.tasks.builtin import BUILTIN

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("task", "kind", "text", "labels or range", "metric", "embedded"):
        table.add_column(
            column,
            no_wrap=column in ("task", "kind", "metric", "embedded"),
            max_width=10 if column == "text" else None,
        )
    for name, task in BUILTIN.items():
        labels = ", ".join(task.labels) if task.labels else "{:g} to {:g}".format(*task.score_range or (0, 1))
        table.add_row(name, task.kind, ", ".join(task.text), labels, task.metric, task.embedded or "")
    show(
        table,
        [
            "",
            "A task with embedded data needs no files: `data.source: embedded`, or a name",
            "that is also in the last column. Others come from the hub, or from",
            "DATA_ROOT/TASK/train.tsv with the text columns and `label`.",
        ],
    )


def config(
    file: Annotated[Path | None, typer.Argument(help="YAML file; without one, the demonstration's.")] = None,
    set: Settings = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config file.")] = False,
) -> None:
    """Check a config as `run` does, and print all of it, with where values come from.

    Examples are read only where their number chooses settings, and only from files.
    """
    from fedmtl.capabilities import check_methods
    from fedmtl.cli.check import config_warnings
    from fedmtl.cli.run import load_explained
    from fedmtl.config.file import config_schema

    if schema:
        write(json.dumps(config_schema(), indent=2))
        return
    from fedmtl.tasks.resolve import check_tasks

    explained = load_explained(file, set or [], "config")
    loaded = explained.config
    if loaded.methods or loaded.federation.aggregation.looks_at_updates():
        # Only then: capabilities load torch.
        check_methods(loaded)
    notes = check_tasks(loaded)
    if explained.follows_examples:
        explained, more = _counted(explained)
        notes += more
    write(explained.commented().rstrip("\n"))
    lines = [*(f"note: {note}" for note in notes), *(f"warning: {line}" for line in config_warnings(loaded))]
    for line in lines:
        make_terminal(stderr=True).print(line, markup=False)


def _counted(explained: Explained) -> tuple[Explained, list[str]]:
    """The config as `run` settles it on these examples; where they are not at hand, notes that say so."""
    from fedmtl.tasks.load import count_examples, load_tasks, needs_hub

    words = "settings that follow the number of examples are not chosen here, but by `fedmtl run`"
    if needs_hub(explained.config):
        return explained, [f"{words}: examples come from the hub"]
    try:
        return explained.with_examples(count_examples(load_tasks(explained.config))), []
    except FedmtlError as error:
        return explained, [f"{words}: {error}"]


def status(run: Run, json_: Json = False) -> None:
    """How far a run is: its rounds, the sites seen, the last failure, what noise has come to."""
    from fedmtl.runs.energy import energy_words
    from fedmtl.runs.log import read_events
    from fedmtl.runs.privacy import privacy_lines
    from fedmtl.runs.summary import run_status

    found = find_run(run)
    events = read_events(found)
    progress = run_status(events, found.name, is_busy=is_busy(found.path))
    if json_:
        write(json.dumps(progress.to_json()))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("site", "tasks", "rounds", "last", "failures", "up", "down", "seconds"):
        table.add_column(column, justify="left" if column in ("site", "tasks") else "right")
    for name, site in progress.sites.items():
        table.add_row(
            name,
            ", ".join(site.tasks),
            str(site.updates),
            "" if site.last_round is None else str(site.last_round),
            str(site.failures),
            amount(site.bytes_up),
            amount(site.bytes_down),
            duration(site.seconds),
        )
    failure = progress.last_failure
    last = "none" if failure is None else f"{failure.client} in round {failure.round}: {failure.reason}"
    spent = [] if progress.energy is None else [f"energy: {energy_words(progress.energy)}"]
    show(
        table,
        [
            f"{progress.name}: {_status_words(progress, found)}, round {progress.rounds} of {progress.num_rounds}",
            *_missing_words(progress),
            f"last failure: {last}",
            *spent,
            *progress.privacy,
            *privacy_lines(events),
        ],
    )


def _status_words(progress: RunStatus, run: RunFolder) -> str:
    if progress.status != "killed":
        return progress.status
    command = "server" if (run.path / "place.json").exists() else "run"
    return f"killed, no process is at work in it (go on with `fedmtl {command} --resume {run.name}`)"


def _missing_words(progress: RunStatus) -> list[str]:
    """Name the sites that are not there; a run on one machine has none."""
    if not progress.missing:
        return []
    where = f"without an update in round {progress.rounds}" if progress.rounds else "not here yet"
    names = [
        client if not progress.rounds else f"{client} ({'never' if last is None else f'last in round {last}'})"
        for client, last in list(progress.missing.items())[:MOST_NAMED]
    ]
    more = f" and {len(progress.missing) - MOST_NAMED} more" if len(progress.missing) > MOST_NAMED else ""
    return [f"{where}: {', '.join(names)}{more}"]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Names or folders of runs; the first is what others are compared to.", autocompletion=complete_run
        ),
    ],
    round: Annotated[
        str | None,
        typer.Option(
            "--round", help="Scores of this round, with best of each run's; otherwise the last.", metavar="best|last|N"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Put runs side by side, with differences, parameters and bytes."""
    from fedmtl.runs.log import read_events
    from fedmtl.runs.summary import summarize

    found = [find_run(name) for name in runs]
    if len(found) < 2:
        raise FedmtlError(f"compare: found only {found[0].name}; name two runs or more")
    summaries = [summarize(read_events(run), run.name, round) for run in found]
    if json_:
        write(json.dumps({"runs": [{**s.to_json(), "parameters": s.parameters} for s in summaries]}))
    else:
        for table in comparison_tables(summaries, make_terminal().width):
            show(table)


def report(run: Run) -> None:
    """Write report.html again and print its path."""
    write(str(api.Run.open(run).report()))
