"""What a cell of the study of compression came to, read from its folder: a run's or a distillation's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedmtl.runs.folder import RunFolder, read_events
from fedmtl.study.measures import Spread, spread
from fedmtl.study.record import read_record


@dataclass(frozen=True)
class Result:
    """A finished cell: each task's main metric after the last pass, what it cost, and how sparse it is.

    `marked` has the tasks on which it does no better than a constant answer, with how. `zeros` are the shares of zeros
    in linear layers and in all weights, where it was pruned by magnitude.
    """

    cell: str
    scores: Mapping[str, float | None]
    metrics: Mapping[str, Mapping[str, float | None]]
    marked: Mapping[str, str]
    parameters: int
    model_bytes: int | None
    examples: int
    copies: int
    seconds: float
    device: str
    cells_at_once: int
    weights_sha256: str
    zeros: tuple[float, float] | None = None


# By setup and seed; None where a cell is not finished.
Results = Mapping[str, Mapping[int, Result | None]]
Measure = Callable[[Result], float | None]


def read_result(run: RunFolder) -> Result:
    """The result of a finished run."""
    events = read_events(run)
    main = {task: about["metric"] for task, about in _last(events, "start")["tasks"].items()}
    last = {event["task"]: event for event in events if event["event"] == "evaluation"}
    rounds = [event for event in events if event["event"] == "round"]
    record = read_record(run)
    return Result(
        cell=run.name,
        scores={task: last[task]["metrics"].get(metric) if task in last else None for task, metric in main.items()},
        metrics={task: dict(event["metrics"]) for task, event in last.items()},
        marked={task: event["marked"] for task, event in last.items() if event.get("marked")},
        parameters=_last(events, "plan")["total"],
        model_bytes=record.get("model_bytes"),
        examples=sum(event.get("samples") or 0 for event in rounds),
        copies=sum(event.get("augmented") or 0 for event in events if event["event"] == "data"),
        seconds=math.fsum(event["seconds"] for event in rounds),
        device=_last(events, "start")["device"],
        cells_at_once=record.get("cells_at_once", 1),
        weights_sha256=_last(events, "end")["weights_sha256"],
        zeros=_zeros(events),
    )


def _last(events: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return [event for event in events if event["event"] == kind][-1]


def _zeros(events: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    told = [event for event in events if event["event"] == "pruning"]
    if not told:
        return None
    linear, every = (told[-1][part]["zeros"] / told[-1][part]["weights"] for part in ("linear", "all"))
    return linear, every


def retention(score: float | None, teacher: float | None) -> float | None:
    """The share of the teacher's score that is left; None where the teacher's is not above 0."""
    return None if score is None or teacher is None or teacher <= 0 else score / teacher


def retained(result: Result, teacher: Result, tasks: Iterable[str]) -> float | None:
    """The mean retention over these tasks; None where one has none."""
    found = [retention(result.scores.get(task), teacher.scores.get(task)) for task in tasks]
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(found) else None


def over_seeds(results: Results, setup: str, measure: Measure) -> Spread | None:
    """The mean of a measure over a setup's seeds; None while one is missing."""
    return spread([None if one is None else measure(one) for one in results.get(setup, {}).values()])


def beside(
    results: Results, setup: str, teacher: str, measure: Callable[[Result, Result], float | None]
) -> Spread | None:
    """The same for a measure of a cell and of the teacher of its seed."""
    above = results.get(teacher, {})
    pairs = [(one, above.get(seed)) for seed, one in results.get(setup, {}).items()]
    return spread([None if one is None or over is None else measure(one, over) for one, over in pairs])
