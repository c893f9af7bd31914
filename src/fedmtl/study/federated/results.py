"""What a cell of the study of federated against centralized came to, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedmtl.config.file import load_config
from fedmtl.runs.folder import RunFolder, read_events
from fedmtl.study.measures import Spread, spread
from fedmtl.study.record import read_record

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Budget:
    """Examples seen by all clients together, their steps, and the steps of the client that made most of them."""

    learning_rate: float
    examples: int
    steps: int
    steps_in_a_row: int
    seconds: float
    computed: str
    cells_at_once: int


@dataclass(frozen=True)
class Result:
    """A finished cell. `curves` has each task's main metric by round; where clients are alone, the mean of theirs.

    `clients` has each client's own score after the last round where every client has a model of its own, `examples` how
    many examples of the task it has.
    """

    cell: str
    metrics: Mapping[str, Mapping[str, float | None]]
    curves: Mapping[str, Mapping[int, float | None]]
    clients: Mapping[str, Mapping[str, float | None]]
    examples: Mapping[str, Mapping[str, int]]
    budget: Budget

    def score(self, task: str) -> float | None:
        """The main metric after the last round."""
        curve = self.curves.get(task, {})
        return curve[max(curve)] if curve else None

    def best(self, task: str) -> tuple[int, float] | None:
        """The first round after which the main metric was highest, and that score."""
        known = {number: value for number, value in self.curves.get(task, {}).items() if number and value is not None}
        return max(known.items(), key=lambda one: (one[1], -one[0]), default=None)


# By setup and seed; None where a cell is not finished.
Results = Mapping[str, Mapping[int, Result | None]]


def read_result(run: RunFolder) -> Result:
    """The result of a finished run."""
    events = read_events(run)
    start = next(event for event in events if event["event"] == "start")
    main = {task: str(about["metric"]) for task, about in start["tasks"].items()}
    scored = [event for event in events if event["event"] == "evaluation"]
    last = {event["task"]: event for event in scored}
    held = next(event for event in events if event["event"] == "clients")["clients"]
    return Result(
        cell=run.name,
        metrics={task: dict(event["metrics"]) for task, event in last.items()},
        curves={task: {e["round"]: _main(e, main[task]) for e in scored if e["task"] == task} for task in main},
        clients={task: dict(event["clients"]) for task, event in last.items() if "clients" in event},
        examples={
            task: {client: about["tasks"][task]["examples"] for client, about in held.items() if task in about["tasks"]}
            for task in main
        },
        budget=_budget(run, start, events),
    )


def _main(event: Event, metric: str) -> float | None:
    """A task's score; of several models, scored on the same examples, the mean of their scores."""
    if "clients" not in event:
        found: float | None = event["metrics"].get(metric)
        return found
    own = list(event["clients"].values())
    return None if not own or None in own else mean(own)


def _budget(run: RunFolder, start: Event, events: Sequence[Event]) -> Budget:
    config = load_config(run.config)
    training = config.training
    steps: dict[str, int] = {}
    for event in (event for event in events if event["event"] == "update"):
        made = training.local_steps or training.local_epochs * sum(
            math.ceil(about["examples"] / config.batch_size_of(task)) for task, about in event["tasks"].items()
        )
        steps[event["client"]] = steps.get(event["client"], 0) + made
    rounds = [event for event in events if event["event"] == "round"]
    return Budget(
        learning_rate=training.learning_rate,
        examples=sum(event.get("samples") or 0 for event in rounds),
        steps=sum(steps.values()),
        steps_in_a_row=max(steps.values(), default=0),
        seconds=math.fsum(event["train_seconds"] for event in rounds),
        computed=_computed(start),
        cells_at_once=read_record(run).get("cells_at_once", 1),
    )


def _computed(start: Event) -> str:
    """Where and how."""
    at_once = f", up to {start['stack']} clients at once" if start["stack"] else ""
    return f"{start['device']}, {start['precision']}{at_once}"


def overall(result: Result, tasks: Iterable[str]) -> float | None:
    """The mean of the tasks' main metrics; None where one is undefined."""
    found = [result.score(task) for task in tasks]
    known = [value for value in found if value is not None]
    return mean(known) if known and len(known) == len(found) else None


def over_seeds(results: Results, setup: str, measure: Callable[[Result], float | None]) -> Spread | None:
    """The mean of a measure over a setup's seeds; None while one is missing."""
    return spread([None if one is None else measure(one) for one in results.get(setup, {}).values()])


def points_above(results: Results, setup: str, other: str, measure: Callable[[Result], float | None]) -> Spread | None:
    """By how many hundredths a measure is above another setup's, seed by seed; None while one is missing."""
    beside = results.get(other, {})
    pairs = [(one, beside.get(seed)) for seed, one in results.get(setup, {}).items()]
    return spread(
        [None if one is None or two is None else difference(measure(one), measure(two)) for one, two in pairs]
    )


def difference(score: float | None, other: float | None) -> float | None:
    """In points, that is hundredths."""
    return None if score is None or other is None else 100 * (score - other)
