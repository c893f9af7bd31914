"""What a person sees while a run goes on: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedmtl.cli.guide_lines import round_lines, summary_lines
from fedmtl.cli.tables import amount, duration, number, results_table
from fedmtl.runs import RunFolder, read_events

Event = Mapping[str, Any]


class Display(Protocol):
    """Follows a run's events; as a context it holds the terminal."""

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def finish(self, run: RunFolder) -> None: ...


def make_display(quiet: bool = False) -> Display:
    """Live in a terminal, lines elsewhere; with `quiet` they go to stderr, so that stdout holds one JSON object."""
    console = Console(stderr=quiet, highlight=False, soft_wrap=not (sys.stderr if quiet else sys.stdout).isatty())
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line per thing that happened."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start: Event = {}
        self.scores: dict[str, tuple[str, float | None]] = {}

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        for line in self.lines(event):
            self.console.print(line, markup=False)

    def lines(self, event: Event) -> list[str]:
        kind = event["event"]
        if kind == "start":
            self.start = event
            return [f"fedmtl {event['version']}, {event['mode']}, {_where(event)}, seed {event['seed']}"]
        if kind == "data":
            return [_data_line(event)]
        if kind == "plan":
            return summary_lines(self.start, event)
        if kind == "failure":
            return [f"  {event['client']} failed in round {event['round']}: {event['reason']}"]
        if kind == "evaluation":
            metric = self.start["tasks"][event["task"]]["metric"]
            self.scores[event["task"]] = (metric, event["metrics"].get(metric))
        if kind == "early_stop":
            return [f"  {event['task']}: head fixed at round {event['best_round']} ({number(event['score'])})"]
        if kind == "round":
            return [*round_lines(event, self.start["num_rounds"]), self.round_line(event)]
        return []

    def round_line(self, event: Event) -> str:
        scores = ", ".join(f"{task} {metric} {number(score)}" for task, (metric, score) in self.scores.items())
        wire = f"up {amount(event['bytes_up'])}, down {amount(event['bytes_down'])}, " if event["round"] else ""
        self.scores = {}
        return f"  after round {event['round']}: {scores or 'not evaluated'} ({wire}{duration(event['seconds'])})"

    def finish(self, run: RunFolder) -> None:
        """The closing table and where to look."""
        events = read_events(run)
        self.console.print(results_table(events, run.name))
        self.console.print(f"report: {run.report}", markup=False, soft_wrap=True)


class LiveDisplay(PlainDisplay):
    """The same lines, with a bar of the round's clients and a table of scores that stay at the bottom."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.rounds = self.progress.add_task("rounds", total=None)
        self.clients = self.progress.add_task("clients", total=None, visible=False)
        self.history: dict[str, list[float | None]] = {}
        self.live = Live(self._view(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        kind = event["event"]
        if kind == "start":
            self.progress.update(self.rounds, total=event["num_rounds"])
        elif kind == "clients":
            self.progress.update(self.clients, total=len(event["clients"]), visible=True)
        elif kind == "answer":
            self.progress.advance(self.clients)
        elif kind == "evaluation":
            metric = self.start["tasks"][event["task"]]["metric"]
            self.history.setdefault(event["task"], []).append(event["metrics"].get(metric))
        elif kind == "round":
            self.progress.update(self.rounds, completed=event["round"])
            self.progress.reset(self.clients, visible=True)
        self.live.update(self._view())

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("task", "metric", "start", "best", "now"):
            table.add_column(column, justify="left" if column in ("task", "metric") else "right")
        for task, scores in self.history.items():
            known = [score for score in scores if score is not None]
            best = max(known) if known else None
            metric = self.start["tasks"][task]["metric"]
            table.add_row(task, metric, number(scores[0]), number(best), number(scores[-1]))
        return Group(table, self.progress) if self.history else Group(self.progress)


def _where(event: Event) -> str:
    workers = event["workers"]
    return f"{event['device']}, {workers} worker processes" if workers else f"{event['device']}, in this process"


def _data_line(event: Event) -> str:
    cut = ", validation cut from train" if event["validation_cut"] else ""
    truncated = f", {event['truncated']:,} truncated" if event["truncated"] else ""
    return (
        f"  {event['task']}: {event['train']:,} train, {event['validation']:,} validation "
        f"({event['source']}{cut}{truncated})"
    )
