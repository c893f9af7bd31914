"""How far a run is, from its events: rounds, sites, the last failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Event = Mapping[str, Any]


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
