"""A run in a row of the list: how far it is and what it came to, read without the events of single clients."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmtl.dashboard.files import Found, Tail, read_event, scan
from fedmtl.foreign import printable
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import (
    EndEvent,
    EvaluationEvent,
    ExamplePrivacyEvent,
    ExpectedEvent,
    PrivacyEvent,
    RoundEvent,
    SiteEvent,
    StartEvent,
    TaskFacts,
)

# The lines of a list are of these kinds; ours begin with their kind, so the others need not be parsed.
_SKIPPED = tuple(
    f'{{"event": "{kind}"'.encode()
    for kind in (
        "aggregation",
        "baseline",
        "clients",
        "config",
        "data",
        "distillation",
        "early_stop",
        "energy",
        "failure",
        "plan",
        "profile",
        "pruning",
        "remark",
        "secure_aggregation",
        "sharing",
        "task_weights",
        "update",
    )
)
# Only the last of these counts: they are parsed when they are shown.
_LAST = tuple(f'{{"event": "{kind}"'.encode() for kind in ("evaluation", "privacy", "example_privacy"))
MOST_TASKS = 200
SPARK_POINTS = 60
LONGEST_TEXT = 300


def words(text: object, most: int = LONGEST_TEXT) -> str:
    """A string of a run folder as it may be shown: without marks that hide or reorder, and not endless."""
    return printable(str(text), most)


def thinned(x: Sequence[int], y: Sequence[float | None], most: int) -> tuple[list[int], list[float | None]]:
    """A curve of at most about `most` points: of each stretch its lowest and highest value, and the ends of the curve.

    So a peak of one round is there however long the run is.
    """
    if len(x) <= most:
        return list(x), list(y)
    stretches = max(1, most // 2 - 1)
    chosen = {0, len(x) - 1}
    for number in range(stretches):
        span = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        known = [(value, at) for at in span if (value := y[at]) is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    order = sorted(chosen)
    return [x[at] for at in order], [y[at] for at in order]


def status_of(end: EndEvent | None, *, has_begun: bool, is_waiting: bool, is_busy: bool) -> str:
    """The word for the state of a run."""
    if end is not None:
        return words(end.status or "done", 20)
    if not is_busy:
        return "killed" if has_begun else "empty"
    return "waiting" if is_waiting else "running"


class Card:
    """What the list shows of one run; `poll` reads what was added since."""

    def __init__(self, run: Found) -> None:
        self.run = run
        self.tail = Tail(run)
        self._clear()
        self._shown: tuple[Any, ...] | None = None
        self._row: dict[str, Any] = {}

    def _clear(self) -> None:
        self.start: StartEvent | None = None
        self.end: EndEvent | None = None
        self.rounds: list[int] = []
        self.overall: list[float | None] = []
        self.bytes = 0
        self.seconds = 0.0
        self.failures = 0
        self.expected: set[str] = set()
        self.come: set[str] = set()
        self._evaluations: list[bytes] = []
        self._before: list[bytes] = []
        self._privacy: dict[bytes, bytes] = {}
        self.version = 0

    def poll(self) -> None:
        """Read what was added; a file that was replaced is read anew."""
        while True:
            is_new, lines = self.tail.read()
            if is_new:
                version = self.version
                self._clear()
                self.version = version + 1
            if not lines:
                return
            self.version += 1
            rest = []
            for line in lines:
                if line.startswith(_LAST):
                    self._note(line)
                else:
                    rest.append(line)
                    # A round that was not scored leaves the scores of the one before.
                    if line.startswith(b'{"event": "round"') and self._evaluations:
                        self._before, self._evaluations = self._evaluations, []
            for event in self.tail.events(rest, _SKIPPED):
                self._take(event)
            if not self.tail.is_behind:
                return

    def _note(self, line: bytes) -> None:
        if line.startswith(_LAST[0]):
            self._evaluations = [*self._evaluations[-MOST_TASKS:], line]
        else:
            self._privacy[line[:20]] = line

    def _take(self, event: Event) -> None:
        match event:
            case StartEvent():
                self.start = event
            case RoundEvent():
                self.expected = set()
                if event.averages is not None:
                    self.rounds.append(event.round)
                    self.overall.append(event.overall)
                self.last_round = event.round
                self.bytes += (event.bytes_up or 0) + (event.bytes_down or 0)
                self.seconds += event.seconds or 0.0
                self.failures += event.failures or 0
            case ExpectedEvent():
                self.expected, self.come = set(event.clients), set()
            case SiteEvent():
                self.come.add(event.client)
            case EndEvent():
                self.end = event
            case _:
                pass

    last_round = 0

    def status(self) -> str:
        """The word for the state of the run now."""
        return status_of(
            self.end,
            has_begun=self.start is not None,
            is_waiting=bool(self.expected - self.come),
            is_busy=self.end is None and self.run.is_busy(),
        )

    def row(self) -> dict[str, Any]:
        """The run in JSON's types, the same object while nothing has changed."""
        shown = (self.version, self.status(), self.tail.is_there, self.tail.is_too_large)
        if shown != self._shown:
            self._shown, self._row = shown, self._make_row(shown[1])
        return self._row

    def _make_row(self, status: str) -> dict[str, Any]:
        start = self.start or StartEvent()
        x, y = thinned(self.rounds, self.overall, SPARK_POINTS)
        known = [value for value in self.overall if value is not None]
        return {
            "id": self.run.id,
            "name": words(self.run.name, 120),
            "study": self.run.study,
            "status": status,
            "reason": words(self.end.reason) if self.end and self.end.reason else "",
            "mode": words(start.mode or "", 60),
            "encoder": words(Path(start.encoder or "").name, 60),
            "rounds": self.last_round if self.rounds else 0,
            "num_rounds": start.num_rounds or 0,
            "x": x,
            "y": y,
            "overall": self.overall[-1] if self.overall else None,
            "best": max(known, default=None),
            "tasks": self._scores(start.tasks),
            "bytes": self.bytes,
            "seconds": self.seconds,
            "failures": self.failures,
            "epsilon": self._epsilon(),
            "broken": self.tail.num_broken,
            "too_large": self.tail.is_too_large,
            "missing": sorted(words(name, 80) for name in self.expected - self.come)[:20],
        }

    def _scores(self, tasks: Mapping[str, TaskFacts]) -> list[dict[str, Any]]:
        scores: dict[str, float | None] = {}
        for line in (*self._before, *self._evaluations):
            event = read_event(line)
            if isinstance(event, EvaluationEvent) and event.task in tasks:
                scores[event.task] = event.metrics.get(tasks[event.task].metric or "")
        return [
            {"task": words(name, 60), "metric": words(facts.metric or "", 40), "score": scores.get(name)}
            for name, facts in list(tasks.items())[:MOST_TASKS]
        ]

    def _epsilon(self) -> float | None:
        """The most that any ledger of the run has come to."""
        spent: list[float] = []
        for line in self._privacy.values():
            event = read_event(line)
            if isinstance(event, PrivacyEvent):
                spent.append(event.epsilon)
            elif isinstance(event, ExamplePrivacyEvent):
                spent += [task.epsilon for task in event.tasks.values()]
        return max(spent, default=None)


class Cards:
    """The list of all runs: folders are looked through anew each time, files are read only where they grew."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.absolute() for root in roots]
        self._cards: OrderedDict[str, Card] = OrderedDict()
        self.studies: dict[str, Found] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """A row of every run that is there now."""
        with self._lock:
            runs, self.studies = scan(self.roots)
            known = self._cards
            self._cards = OrderedDict((run.id, known.get(run.id) or Card(run)) for run in runs)
            for card in self._cards.values():
                card.poll()
            return [card.row() for card in self._cards.values()]

    def find(self, id: str) -> Found | None:
        """The run of that id; one that came since the last look is found too."""
        card = self._cards.get(id)
        if card is None:
            self.rows()
            card = self._cards.get(id)
        return None if card is None else card.run

    def study_rows(self) -> list[dict[str, Any]]:
        """A row of every study that the last look found."""
        return [{"id": id, "name": words(study.name, 120)} for id, study in self.studies.items()]
