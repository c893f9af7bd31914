"""A run's events are summed up here: what it came to (`summarize`) and how far it is (`run_status`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_LOWER_IS_BETTER = frozenset({"mse", "rmse", "mae"})

Metrics = dict[str, float | None]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Best:
    """The best value of a metric and the first round that reached it."""

    value: float
    round: int


@dataclass(frozen=True)
class TaskSummary:
    """One task's metrics at its first, best and last evaluation; None is undefined.

    `passes` is how often its training examples, those of all clients together, were trained on.
    """

    kind: str
    metric: str
    start: Metrics
    best: dict[str, Best | None]
    final: Metrics
    marked: str | None
    passes: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers.

    `parameters` counts all values that are kept, at the server and at clients; `rounds` counts rounds of training;
    `status` is `unfinished` without an end.
    """

    name: str
    mode: str
    status: str
    synthetic: bool
    tasks: dict[str, TaskSummary]
    overall: float | None
    classification: float | None
    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int
    failures: tuple[dict[str, Any], ...]
    parameters: int | None
    weights_sha256: str | None

    def to_json(self) -> dict[str, Any]:
        """What `fedmtl run --json` prints."""
        return {
            "name": self.name,
            "mode": self.mode,
            "metrics": {name: task.final for name, task in self.tasks.items()},
            "start": {name: task.start for name, task in self.tasks.items()},
            "best": {
                name: {metric: asdict(best) if best else None for metric, best in task.best.items()}
                for name, task in self.tasks.items()
            },
            "passes": {name: task.passes for name, task in self.tasks.items()},
            "rounds": self.rounds,
            "seconds": self.seconds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "failures": list(self.failures),
            "weights_sha256": self.weights_sha256,
        }


def summarize(events: Sequence[Mapping[str, Any]], name: str = "") -> RunSummary:
    """The summary of a run, finished or not; bytes and seconds count every round."""
    start, plan, end = (_last(events, kind) for kind in ("start", "plan", "end"))
    rounds = [event for event in events if event["event"] == "round"]
    scored = [event for event in events if event["event"] == "evaluation"]
    train = {event["task"]: event.get("train") for event in events if event["event"] == "data"}
    averaged = [event for event in rounds if "overall" in event]
    final = averaged[-1] if averaged else {}
    return RunSummary(
        name=name,
        mode=start.get("mode", ""),
        status=end.get("status", "unfinished"),
        synthetic=bool(start.get("synthetic", False)),
        tasks={
            task: _summarize_task(
                about, [event for event in scored if event["task"] == task], passes(train.get(task), rounds, task)
            )
            for task, about in start.get("tasks", {}).items()
        },
        overall=final.get("overall"),
        classification=final.get("classification"),
        rounds=max((event["round"] for event in rounds), default=0),
        seconds=end.get("seconds") or sum(event.get("seconds") or 0.0 for event in rounds),
        bytes_up=sum(event.get("bytes_up") or 0 for event in rounds),
        bytes_down=sum(event.get("bytes_down") or 0 for event in rounds),
        failures=tuple(
            {key: event.get(key) for key in ("round", "client", "reason")}
            for event in events
            if event["event"] == "failure"
        ),
        parameters=plan["total"] + plan.get("at_clients", 0) if "total" in plan else None,
        weights_sha256=end.get("weights_sha256"),
    )


def passes(train: float | None, rounds: Iterable[Mapping[str, Any]], task: str) -> float | None:
    """Examples of the task that were trained on, over the `train` there are; None where either was not recorded."""
    told = [event["seen"] for event in rounds if "seen" in event]
    return sum(seen.get(task, 0) for seen in told) / train if train and told else None


def _summarize_task(
    about: Mapping[str, Any], scored: Sequence[Mapping[str, Any]], num_passes: float | None
) -> TaskSummary:
    first, last = (scored[0], scored[-1]) if scored else ({}, {})
    metrics = list(dict.fromkeys(metric for event in scored for metric in event["metrics"]))
    return TaskSummary(
        kind=about["kind"],
        metric=about.get("metric", ""),
        start=dict(first.get("metrics", {})),
        best={metric: _best(metric, scored) for metric in metrics},
        final=dict(last.get("metrics", {})),
        marked=last.get("marked"),
        passes=num_passes,
    )


def _best(metric: str, scored: Sequence[Mapping[str, Any]]) -> Best | None:
    defined = [event for event in scored if event["metrics"].get(metric) is not None]
    if not defined:
        return None
    # min and max keep the first of equals, so a tie is won by the earlier round.
    choose = min if metric in _LOWER_IS_BETTER else max
    event = choose(defined, key=lambda event: event["metrics"][metric])
    return Best(event["metrics"][metric], event["round"])


def _last(events: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return next((event for event in reversed(events) if event["event"] == kind), {})


@dataclass(frozen=True)
class SiteStatus:
    """One client so far."""

    tasks: tuple[str, ...] = ()
    updates: int = 0
    failures: int = 0
    last_round: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RunStatus:
    """`status` is that of the end, or `running` where there is none."""

    name: str
    status: str
    rounds: int
    num_rounds: int
    sites: Mapping[str, SiteStatus]
    last_failure: Event | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_status(events: Sequence[Event], name: str) -> RunStatus:
    sites: dict[str, SiteStatus] = {}
    status, rounds, num_rounds = "waiting", 0, 0
    last_failure: Event | None = None
    for event in events:
        kind, client = event["event"], event.get("client", "")
        if kind == "start":
            num_rounds = event.get("num_rounds", 0)
        elif kind == "clients":
            for known, about in event["clients"].items():
                sites.setdefault(known, SiteStatus(tuple(about.get("tasks", ()))))
        elif kind == "site":
            sites[client] = replace(sites.get(client, SiteStatus()), tasks=tuple(event["tasks"]))
        elif kind == "round":
            status, rounds = "running", event["round"]
        elif kind == "update":
            sites[client] = _updated(sites.get(client, SiteStatus(tuple(event.get("tasks", ())))), event)
        elif kind == "failure":
            before = sites.get(client, SiteStatus())
            sites[client] = replace(before, failures=before.failures + 1)
            last_failure = {"round": event["round"], "client": client, "reason": event.get("reason", "")}
        elif kind == "end":
            status = event.get("status", "")
    return RunStatus(name, status, rounds, num_rounds, sites, last_failure)


def _updated(before: SiteStatus, event: Event) -> SiteStatus:
    return replace(
        before,
        updates=before.updates + 1,
        last_round=event["round"],
        bytes_up=before.bytes_up + event.get("bytes_up", 0),
        bytes_down=before.bytes_down + event.get("bytes_down", 0),
        seconds=before.seconds + event.get("seconds", 0.0),
    )
