"""The events of one run, sorted by what they are about. Missing and unfinished parts are simply empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What happened, by task, round and client; `end` is empty while the run has not ended."""

    name: str
    start: Event
    data: dict[str, Event]
    clients: dict[str, Event]
    plans: tuple[Event, ...]
    updates: tuple[Event, ...]
    failures: tuple[Event, ...]
    evaluations: dict[str, dict[int, Event]]
    stops: dict[str, Event]
    rounds: dict[int, Event]
    end: Event
    distillations: tuple[Event, ...] = ()
    weights: dict[int, Event] = field(default_factory=dict)
    decisions: dict[int, Event] = field(default_factory=dict)
    pruned: dict[int, Event] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task that any event names, the configured ones first."""
        return tuple({**self.start.get("tasks", {}), **self.data, **self.evaluations})

    @property
    def last_round(self) -> int:
        scored = (number for by_round in self.evaluations.values() for number in by_round)
        return max((*self.rounds, *scored), default=0)

    def task(self, name: str) -> Event:
        """What the start event says about a task; empty when it says nothing."""
        found: Event = self.start.get("tasks", {}).get(name) or {}
        return found


def gather(events: Sequence[Event], name: str) -> Run:
    """The run that `events` tell of; where two events speak of the same thing the later one holds."""
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("event") in ("start", "round"):
            kinds["end"].clear()  # A run that goes on after its end was resumed.
        kinds[str(event.get("event"))].append(event)
    evaluations: dict[str, dict[int, Event]] = {}
    for event in kinds["evaluation"]:
        evaluations.setdefault(event["task"], {})[event["round"]] = event
    return Run(
        name=name,
        start=(kinds["start"] or [{}])[-1],
        data={event["task"]: event for event in kinds["data"]},
        clients={client: info for event in kinds["clients"] for client, info in event["clients"].items()},
        plans=tuple(kinds["plan"]),
        updates=tuple(kinds["update"]),
        failures=tuple(kinds["failure"]),
        evaluations={task: dict(sorted(by_round.items())) for task, by_round in evaluations.items()},
        stops={event["task"]: event for event in kinds["early_stop"]},
        rounds={event["round"]: event for event in sorted(kinds["round"], key=lambda event: event["round"])},
        end=(kinds["end"] or [{}])[-1],
        distillations=tuple(kinds["distillation"]),
        weights={event["round"]: event for event in kinds["task_weights"]},
        decisions={event["round"]: event for event in kinds["sharing"]},
        pruned={event["round"]: event for event in kinds["pruning"]},
    )
