"""What one cell came to: its scores, what they cost, and how large its model is. All of it is read from the folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from fedmtl.config.file import load_config
from fedmtl.runs.folder import RunFolder, read_events
from fedmtl.study.record import read_record

Event = Mapping[str, Any]
Scores = dict[str, dict[str, float | None]]
# One number for a model that was scored on several tasks; None where a score is undefined.
Average = Callable[[Scores], float | None]


@dataclass(frozen=True)
class Reached:
    """All scores of one evaluation, `evaluations` by task as the event has them, and their average."""

    round: int
    evaluations: Mapping[str, Event]
    average: float | None

    @property
    def scores(self) -> Scores:
        return {task: dict(event["metrics"]) for task, event in self.evaluations.items()}


@dataclass(frozen=True)
class Budget:
    """What training a cell took; `passes` are the times its steps went through each task's examples."""

    steps: int
    examples: int
    passes: Mapping[str, float]
    train_seconds: float
    evaluate_seconds: float
    device: str
    cells_at_once: int


@dataclass(frozen=True)
class Measured:
    """A finished cell. `best` is the evaluation with the best average: chosen by the examples it is scored on."""

    cell: str
    final: Reached
    best: Reached
    losses: Mapping[int, Mapping[str, float]]
    labels: Mapping[str, Sequence[str]]
    budget: Budget
    parameters: int
    trainable: int
    trained_bytes: int
    model_bytes: int


def read_cell(run: RunFolder, average: Average) -> Measured:
    """The measures of a settled run."""
    events = read_events(run)
    record = read_record(run)
    reached = _reached(events, average)
    plan = _first(events, "plan")
    scopes = [(scope["level"], scope["parameters"]) for scope in plan["scopes"]]
    return Measured(
        cell=run.name,
        final=reached[-1],
        best=max(_trained(reached), key=lambda one: (-math.inf if one.average is None else one.average, -one.round)),
        losses={e["round"]: e["losses"] for e in events if e["event"] == "round" and e["losses"]},
        labels={task: about["labels"] for task, about in _first(events, "start")["tasks"].items()},
        budget=_budget(run, events, record.get("cells_at_once", 1)),
        parameters=plan["total"],
        trainable=sum(count for level, count in scopes if level != "fixed"),
        trained_bytes=record["trained_bytes"],
        model_bytes=record["model_bytes"],
    )


def _first(events: Sequence[Event], kind: str) -> Event:
    return next(event for event in events if event["event"] == kind)


def _reached(events: Sequence[Event], average: Average) -> list[Reached]:
    by_round: dict[int, dict[str, Event]] = {}
    for event in events:
        if event["event"] == "evaluation":
            by_round.setdefault(event["round"], {})[event["task"]] = event
    return [
        Reached(number, found, average({task: dict(event["metrics"]) for task, event in found.items()}))
        for number, found in sorted(by_round.items())
    ]


def _trained(reached: Sequence[Reached]) -> Sequence[Reached]:
    """Those after training, unless there are none; before it, heads are as they were made."""
    return [one for one in reached if one.round] or reached


def _budget(run: RunFolder, events: Sequence[Event], at_once: int) -> Budget:
    rounds = [event for event in events if event["event"] == "round"]
    config = load_config(run.config)
    samples = sum(event.get("samples") or 0 for event in rounds)
    trained = sum(bool(event.get("samples")) for event in rounds)
    seen = [part for event in rounds for part in event.get("seen", {}).items()]
    batches = sum(number / config.batch_size_of(task) for task, number in seen)
    return Budget(
        steps=trained * config.training.local_steps if config.training.local_steps else round(batches),
        examples=samples,
        passes=_passes(events, rounds),
        train_seconds=math.fsum(event["train_seconds"] for event in rounds),
        evaluate_seconds=math.fsum(event["evaluate_seconds"] for event in rounds),
        device=_first(events, "start")["device"],
        cells_at_once=at_once,
    )


def _passes(events: Sequence[Event], rounds: Sequence[Event]) -> dict[str, float]:
    examples = {event["task"]: event["train"] for event in events if event["event"] == "data"}
    return {
        task: sum(event.get("seen", {}).get(task, 0) for event in rounds) / count for task, count in examples.items()
    }


@dataclass(frozen=True)
class Spread:
    """The mean of a number over seeds and its sample standard deviation; None where one seed says nothing of it."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """None where a value is missing or undefined: a mean over the seeds that went well would flatter."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(mean(known), stdev(known) if len(known) > 1 else None, len(known))
