"""A person sees a run go on: a live display in a terminal, plain lines elsewhere, its pace and the time left."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedmtl.cli.tables import (
    amount,
    duration,
    number,
    profile_table,
    result_notes,
    results_table,
    round_lines,
    summary_lines,
)
from fedmtl.cli.terminal import Terminal, make_terminal
from fedmtl.foreign import printable
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize

# The last rounds tell most: early ones start workers, and clients may join.
RECENT = 5
Event = Mapping[str, Any]


class Pace:
    """Follows a run's events; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_rounds = 0
        self._number = 0
        self._samples = 0
        self._opened = clock()
        self._seconds: list[float] = []
        self._rate: float | None = None

    def see(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._num_rounds = event.get("num_rounds", 0)
        elif kind == "answer":
            self._samples += event.get("samples", 0)
            spent = self._clock() - self._opened
            # A few answers say little: until half a round has passed, the last round's rate stands.
            if self._samples and spent > (self._seconds[-1] / 2 if self._seconds else 0):
                self._rate = self._samples / spent
        elif kind == "round":
            self._number = event["round"]
            if event.get("samples"):
                seconds = event.get("seconds", 0.0)
                self._seconds = [*self._seconds, seconds][-RECENT:]
                self._rate = event["samples"] / seconds if seconds > 0 else self._rate
            self._opened, self._samples = self._clock(), 0

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second of the round, with all that belongs to a round."""
        return self._rate

    @property
    def seconds_left(self) -> float | None:
        """None until a round of training has shown how long one takes."""
        if not self._seconds:
            return None
        one, left = median(self._seconds), self._num_rounds - self._number
        return max(0.0, one * left - min(one, self._clock() - self._opened))

    def words(self) -> str:
        """Both in words, as far as they are known."""
        parts = [] if self._rate is None else [f"{self._rate:,.0f} samples/s"]
        left = self.seconds_left
        if left is not None and self._number < self._num_rounds:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


class Display(Protocol):
    """Follows a run's events; as a context it holds the terminal. `name` is that of a run that is resumed."""

    name: str

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
    def say(self, line: str) -> None: ...
    def finish(self, run: RunFolder) -> None: ...


def make_display(*, stderr: bool = False) -> Display:
    """Live in a terminal, lines elsewhere; on stderr where stdout is to hold one JSON object."""
    terminal = make_terminal(stderr=stderr)
    return LiveDisplay(terminal) if terminal.is_terminal else PlainDisplay(terminal)


class PlainDisplay:
    """One line per thing that happened."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.start: Event = {}
        self.scores: dict[str, tuple[str, float | None]] = {}
        self.skipped = -1
        self.name = "the run"
        self.is_deployed = False
        self.pace = Pace()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        self.pace.see(event)
        lines = self.lines(event)
        if event["event"] == "resumed" or event.get("round", self.skipped + 1) > self.skipped:
            for line in lines:
                self.say(line)

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)

    def lines(self, event: Event) -> list[str]:
        kind = event["event"]
        if kind == "resumed":
            return self._resumed(event)
        if kind == "start":
            self.start = event
            known = (str(event.get(name, "–")) for name in ("version", "mode", "seed"))
            return ["fedmtl {}, {}, {where}, seed {}".format(*known, where=_where(event))]
        if kind == "data":
            return [_data_line(event)]
        if kind == "teacher":
            return [f"  the teacher answers {event['examples']:,} examples of {event['task']}"]
        if kind == "plan" and "round" not in event:
            return summary_lines(self.start, event)
        if kind == "waiting":
            self.is_deployed = True
            return [f"listening on {event['address']}, waiting for {', '.join(event['clients']) or 'enrolled sites'}"]
        if kind == "site":
            return [f"  {event['client']} is here with {', '.join(event['tasks'])}"]
        if kind == "failure":
            return [f"  {event['client']} failed in round {event['round']}: {event.get('reason')}"]
        if kind == "remark":
            return [f"  note: {event['client']}{' ' if event['client'] else ''}{event.get('reason')}"]
        if kind == "evaluation":
            metric = self._metric(event["task"])
            self.scores[event["task"]] = (metric, event["metrics"].get(metric))
        if kind == "early_stop":
            return [f"  {event['task']}: head fixed at round {event['best_round']} ({number(event.get('score'))})"]
        if kind == "sharing":
            moves = [layer for layer in event["layers"] if layer["before"] != layer["after"]]
            return [f"  {m['layer']}: {m['before']} -> {m['after']}, {m['reason']}" for m in moves]
        if kind == "round":
            return [*round_lines(event, self.start), self.round_line(event)]
        return []

    def _resumed(self, event: Event) -> list[str]:
        """What a resume goes on from; its earlier rounds are told again by events, and not said again."""
        self.skipped = event["round"]
        missing = event["missing"]
        return [
            *(f"  {problem}" for problem in event["broken"]),
            *([f"  the events of {missing} are lost; the weights are not"] if missing else []),
            f"{self.name} goes on after round {event['round']}",
        ]

    def round_line(self, event: Event) -> str:
        scores = ", ".join(f"{task} {metric} {number(score)}" for task, (metric, score) in self.scores.items())
        up, down = (amount(event.get(way, 0)) for way in ("bytes_up", "bytes_down"))
        wire = f"up {up}, down {down}, " if event["round"] else ""
        pace = self.pace.words()
        ends = f"{duration(event.get('seconds', 0.0))}{self._overhead(event)}{', ' if pace else ''}{pace}"
        self.scores = {}
        return f"  after round {event['round']}: {scores or 'not evaluated'} ({wire}{ends})"

    def _overhead(self, event: Event) -> str:
        """Between machines: what a round took beyond its slowest site's training and the scoring."""
        if not self.is_deployed or not event.get("clients"):
            return ""
        other = event.get("train_seconds", 0.0) - event.get("longest_client_seconds", 0.0)
        return f", {duration(other)} of it not training"

    def _metric(self, task: str) -> str:
        """The task's main metric, as the run's start named it."""
        return str(self.start.get("tasks", {}).get(task, {}).get("metric", ""))

    def finish(self, run: RunFolder) -> None:
        """The closing table and where to look; where the seconds went, if the run told."""
        events = read_events(run)
        summary = summarize(events, run.name)
        self.terminal.print(results_table(summary), soft_wrap=False)
        for note in result_notes(summary):
            self.say(note)
        spent = profile_table(events, self.start.get("workers", 1))
        if spent is not None:
            self.terminal.print(spent, soft_wrap=False)
        self.terminal.print(f"report: {run.report}", markup=False, soft_wrap=True)


class LiveDisplay(PlainDisplay):
    """The same lines, with bars of rounds and clients and a table of scores that stay at the bottom."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=terminal,
        )
        self.rounds: TaskID | None = None
        self.clients: TaskID | None = None
        self.history: dict[str, list[float | None]] = {}
        self.waiting = Spinner("line", "loading the data and the encoder")
        self.live = Live(self.waiting, console=terminal, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        kind = event["event"]
        if kind == "start":
            self.rounds = self.progress.add_task("rounds", total=event.get("num_rounds", 0))
        elif kind == "clients":
            self.clients = self.progress.add_task("clients", total=len(event["clients"]))
        elif kind == "answer" and self.clients is not None:
            self.progress.advance(self.clients)
        elif kind == "evaluation":
            metric = self._metric(event["task"])
            self.history.setdefault(event["task"], []).append(event["metrics"].get(metric))
        elif kind == "round":
            if self.rounds is not None:
                self.progress.update(self.rounds, completed=event["round"])
            # Where clients are sampled, or join and leave, the last round's number is the best guess.
            asked = event.get("clients", 0) + event.get("failures", 0)
            if self.clients is not None:
                self.progress.reset(self.clients, **({"total": asked} if asked else {}))
        self.live.update(self._view())

    def say(self, line: str) -> None:
        """Long lines are cut at words, and go on further to the right than they began."""
        line = printable(line)
        inner = len(line) - len(line.lstrip()) + 2
        for part in textwrap.wrap(
            line, self.terminal.width, subsequent_indent=" " * inner, break_on_hyphens=False, break_long_words=False
        ):
            super().say(part)

    def _view(self) -> RenderableType:
        if not self.start:
            return self.waiting
        table = Table(box=None, pad_edge=False)
        for column in ("task", "metric", "start", "best", "now"):
            table.add_column(column, justify="left" if column in ("task", "metric") else "right")
        for task, scores in self.history.items():
            known = [score for score in scores if score is not None]
            best = max(known) if known else None
            table.add_row(task, self._metric(task), number(scores[0]), number(best), number(scores[-1]))
        parts: list[RenderableType] = [*([table] if self.history else []), self.progress]
        pace = self.pace.words()
        return Group(*parts, Text(pace)) if pace else Group(*parts)


def _where(event: Event) -> str:
    device, workers, stack = event.get("device", "–"), event.get("workers", 0), event.get("stack", 0)
    if stack:
        return f"{device}, {stack} clients at once, {event.get('precision', '–')}"
    return f"{device}, {workers} worker processes" if workers else f"{device}, in this process"


def _data_line(event: Event) -> str:
    cut = ", validation cut from train" if event.get("validation_cut") else ""
    truncated = f", {event['truncated']:,} truncated" if event.get("truncated") else ""
    return (
        f"  {event['task']}: {event.get('train', 0):,} train, {event.get('validation', 0):,} validation "
        f"({event.get('source', '–')}{cut}{truncated})"
    )
