"""One run in full, as the page shows it: its events are taken in as they come, and sections say when they changed.

Everything here came from a file that anybody may have written: names and reasons are cut and made printable, lists are
bounded, and curves are thinned before they are sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from fedmtl.config import Config
from fedmtl.dashboard.card import MOST_TASKS, status_of, thinned, words
from fedmtl.dashboard.files import Found, Tail
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import (
    BaselineEvent,
    ClientsEvent,
    ConfigEvent,
    DataEvent,
    EarlyStopEvent,
    EndEvent,
    EnergyEvent,
    EvaluationEvent,
    ExamplePrivacyEvent,
    ExpectedEvent,
    FailureEvent,
    PlanEvent,
    PrivacyEvent,
    RemarkEvent,
    RoundEvent,
    SecureAggregationEvent,
    SharingEvent,
    SiteEvent,
    StartEvent,
    UpdateEvent,
)

SECTIONS = ("head", "curves", "sites", "plan", "timeline", "failures", "config")
MOST_SITES, MOST_FAILURES, MOST_ROUNDS, MOST_LAYERS, MOST_KEYS = 5_000, 200, 60, 300, 1_000
# Of all curves of a run together, and of one.
POINTS, FEWEST_POINTS, MOST_POINTS = 4_000, 40, 300
STRIP, MOST_SERIES = 30, 24
_LOWER_IS_BETTER = frozenset({"mse", "rmse", "mae"})
_LATE = ("no answer within", "in time", "round_timeout", "deadline")


@dataclass
class Series:
    """A curve: a value by round, None where it is undefined."""

    x: list[int] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)

    def add(self, x: int, y: float | None) -> None:
        self.x.append(x)
        self.y.append(y)

    def to_json(self, most: int) -> dict[str, Any]:
        x, y = thinned(self.x, self.y, most)
        return {"x": x, "y": y}


@dataclass
class Site:
    """One client so far; `strip` has a letter a round: u an update, l late, r refused."""

    tasks: dict[str, int | None] = field(default_factory=dict)
    updates: int = 0
    failures: int = 0
    last_round: int | None = None
    failed_round: int | None = None
    reason: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    shares: dict[str, float | None] = field(default_factory=dict)
    seen: int | None = None
    seen_at: float | None = None
    has_come: bool = False
    strip: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=STRIP))


def is_late(reason: str) -> bool:
    """Whether a failure says that nothing came in time; any other is a refusal."""
    return any(part in reason for part in _LATE)


class RunState:
    """Everything that the page of a run shows; `poll` takes in what was added since."""

    def __init__(self, run: Found) -> None:
        self.run = run
        self.tail = Tail(run)
        self.lock = threading.Lock()
        self.versions = dict.fromkeys(SECTIONS, 0)
        self._status = ""
        self._is_live = self._is_stale = False
        self._clear()

    def _clear(self) -> None:
        self.start = StartEvent()
        self.has_begun = False
        self.end: EndEvent | None = None
        self.round = 0
        self.is_opened = False
        self.overall = Series()
        self.series: dict[str, dict[str, Series]] = {}
        self.final: dict[str, EvaluationEvent] = {}
        self.data: dict[str, DataEvent] = {}
        self.baselines: dict[str, dict[str, dict[str, float | None]]] = {}
        self.stops: dict[str, EarlyStopEvent] = {}
        self.sites: dict[str, Site] = {}
        self.expected: set[str] = set()
        self.plan: PlanEvent | None = None
        self.moves: deque[dict[str, Any]] = deque(maxlen=MOST_FAILURES)
        self.rounds: deque[RoundEvent] = deque(maxlen=MOST_ROUNDS)
        self.failures: deque[dict[str, Any]] = deque(maxlen=MOST_FAILURES)
        self.num_failures = 0
        self.config: dict[str, Any] = {}
        self.bytes_up = self.bytes_down = 0
        self.seconds = 0.0
        self.joules = 0.0
        self.privacy: dict[str, str] = {}

    def poll(self) -> bool:
        """Take in at most one chunk of what was added; whether there is more at once."""
        with self.lock:
            was_there = self.tail.is_there
            is_new, lines = self.tail.read()
            changed: set[str] = set()
            self._is_stale = self._is_stale or is_new
            if self._is_stale and self.tail.is_there:
                # Of a folder that is gone, what was read stays on the page.
                self._clear()
                self._is_stale = False
                changed = set(SECTIONS)
            for event in self.tail.events(lines):
                changed |= self._take(event)
            if lines or was_there != self.tail.is_there:
                changed.add("head")
            self._is_live = self._is_live or not self.tail.is_behind
            status = self.status()
            if status != self._status:
                self._status = status
                changed |= {"head", "sites"}
            for name in changed:
                self.versions[name] += 1
            return self.tail.is_behind

    def status(self) -> str:
        """The word for the state of the run; a file that is gone says so."""
        if not self.tail.is_there:
            return "gone" if self.has_begun else "empty"
        return status_of(
            self.end,
            has_begun=self.has_begun,
            is_waiting=bool(self._missing()),
            is_busy=self.end is None and self.run.is_busy(),
        )

    def _missing(self) -> list[str]:
        """The sites that the server waits for before its next round."""
        if not self.is_opened:
            return []
        return sorted(name for name in self.expected if name not in self.sites or not self.sites[name].has_come)

    def _take(self, event: Event) -> set[str]:
        """Take one event in, and name the sections that it changes."""
        match event:
            case StartEvent():
                self.start, self.has_begun = event, True
                return {"head", "curves"}
            case ConfigEvent():
                self.config = event.config
                return {"config"}
            case DataEvent():
                self._bound(self.data, event.task, event)
                return {"curves"}
            case PlanEvent():
                self.plan = event
                return {"plan"}
            case SharingEvent():
                self.moves.extend(
                    {"round": event.round, "layer": words(one.layer), "before": words(one.before),
                     "after": words(one.after), "reason": words(one.reason)}
                    for one in event.layers
                    if one.before != one.after
                )  # fmt: skip
                return {"plan"}
            case RoundEvent():
                return self._take_round(event)
            case EvaluationEvent():
                self._take_scores(event)
                return {"curves"}
            case BaselineEvent():
                self._bound(self.baselines, event.task, self.baselines.get(event.task, {}))
                self._bound(self.baselines.get(event.task, {}), event.name, dict(event.metrics))
                return {"curves"}
            case EarlyStopEvent():
                self._bound(self.stops, event.task, event)
                return {"curves"}
            case EndEvent():
                self.end = event
                return set(SECTIONS[:3])
            case EnergyEvent():
                self.joules += (event.cpu_joules or 0.0) + (event.gpu_joules or 0.0)
                return {"head"}
            case PrivacyEvent() | ExamplePrivacyEvent() | SecureAggregationEvent():
                self._take_privacy(event)
                return {"head"}
            case _:
                return self._take_site(event)

    def _take_round(self, event: RoundEvent) -> set[str]:
        self.round, self.is_opened = event.round, False
        self.rounds.append(event)
        self.bytes_up += event.bytes_up or 0
        self.bytes_down += event.bytes_down or 0
        self.seconds += event.seconds or 0.0
        if event.averages is not None:
            self.overall.add(event.round, event.overall)
        for task, loss in event.losses.items():
            self._of(task, "training loss").add(event.round, loss)
        return {"head", "curves", "sites", "timeline"}

    def _take_scores(self, event: EvaluationEvent) -> None:
        self._bound(self.final, event.task, event)
        for name, value in list(event.metrics.items())[:20]:
            self._of(event.task, name).add(event.round, value)
        if event.loss is not None:
            self._of(event.task, "validation loss").add(event.round, event.loss)

    def _of(self, task: str, name: str) -> Series:
        if task not in self.series and len(self.series) >= MOST_TASKS:
            return Series()
        curves = self.series.setdefault(task, {})
        return Series() if name not in curves and len(curves) >= MOST_SERIES else curves.setdefault(name, Series())

    @staticmethod
    def _bound(records: dict[str, Any], name: str, record: Any) -> None:
        if name in records or len(records) < MOST_TASKS:
            records[name] = record

    def _take_privacy(self, event: PrivacyEvent | ExamplePrivacyEvent | SecureAggregationEvent) -> None:
        if isinstance(event, PrivacyEvent):
            spent = f"epsilon {event.epsilon:.3g} at delta {event.delta:.1g} ({words(event.unit, 60)}s)"
            self._bound(self.privacy, f"{event.unit}s", spent)
        elif isinstance(event, ExamplePrivacyEvent):
            for name, task in list(event.tasks.items())[:MOST_TASKS]:
                spent = f"epsilon {task.epsilon:.3g} at delta {event.delta:.1g}"
                self._bound(self.privacy, f"examples {name}", f"{spent} (examples of {words(name, 60)})")
        elif event.opened:
            least = min(event.opened.values())
            self.privacy["masks"] = (
                f"secure aggregation: sums over {least} clients or more were opened in round {event.round}"
            )

    def _take_site(self, event: Event) -> set[str]:
        match event:
            case ClientsEvent():
                for name, facts in event.clients.items():
                    site = self._site(name)
                    site.tasks = {task: share.examples for task, share in facts.tasks.items()}
                return {"sites"}
            case ExpectedEvent():
                self.expected, self.is_opened = set(event.clients[:MOST_SITES]), True
                for name in self.expected:
                    self._site(name).has_come = False
                return {"head", "sites"}
            case SiteEvent():
                site = self._site(event.client)
                site.has_come, site.tasks = (
                    True,
                    {task: count if isinstance(count, int) else None for task, count in event.tasks.items()},
                )
                self._saw(site, event.round)
                return {"head", "sites"}
            case UpdateEvent():
                self._take_update(event)
                return {"sites"}
            case FailureEvent():
                self._take_failure(event)
                return {"head", "sites", "failures"}
            case RemarkEvent():
                self.failures.append(self._line("remark", event))
                return {"failures"}
            case _:
                return set()

    def _take_update(self, event: UpdateEvent) -> None:
        site = self._site(event.client)
        site.updates += 1
        site.last_round, site.has_come = event.round, True
        site.bytes_up += event.bytes_up or 0
        site.bytes_down += event.bytes_down or 0
        site.seconds += event.seconds or 0.0
        site.shares = dict(event.shares or {})
        for task, part in event.tasks.items():
            if site.tasks.get(task) is None:
                site.tasks[task] = part.examples
        site.strip.append((event.round, "u"))
        self._saw(site, event.round)

    def _take_failure(self, event: FailureEvent) -> None:
        site, reason = self._site(event.client), event.reason or ""
        site.failures += 1
        site.failed_round, site.reason = event.round, words(reason)
        site.bytes_up += event.bytes_up or 0
        site.bytes_down += event.bytes_down or 0
        site.strip.append((event.round, "l" if is_late(reason) else "r"))
        if not is_late(reason):
            self._saw(site, event.round)
        self.num_failures += 1
        self.failures.append(self._line("late" if is_late(reason) else "refused", event))

    def _site(self, name: str) -> Site:
        if name not in self.sites and len(self.sites) >= MOST_SITES:
            return Site()
        return self.sites.setdefault(name, Site())

    def _saw(self, site: Site, round: int) -> None:
        site.seen = round
        # Events have no clock: when one came is known of those that came while we looked.
        site.seen_at = time.time() if self._is_live else None

    @staticmethod
    def _line(kind: str, event: FailureEvent | RemarkEvent) -> dict[str, Any]:
        return {
            "kind": kind,
            "round": event.round,
            "client": words(event.client, 80),
            "reason": words(event.reason or "", 1000),
        }

    def sections(self, known: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
        """The sections that are newer than the versions `known`, and the versions now."""
        with self.lock:
            versions = dict(self.versions)
            changed = [name for name in SECTIONS if known.get(name) != versions[name]]
            return {name: getattr(self, f"_{name}_section")() for name in changed}, versions

    def _head_section(self) -> dict[str, Any]:
        start, end = self.start, self.end
        energy = end.energy if end else None
        joules = self.joules if energy is None else (energy.cpu_joules or 0.0) + (energy.gpu_joules or 0.0)
        known = [(value, -at) for at, value in zip(self.overall.x, self.overall.y, strict=True) if value is not None]
        best = max(known, default=None)
        facts = {
            "mode": start.mode,
            "encoder": start.encoder,
            "seed": start.seed,
            "device": start.device,
            "precision": start.precision,
            "kernels": start.kernels,
            "fedmtl": start.version,
            "torch": start.torch,
            "weights": end.weights_sha256 if end else None,
        }
        return {
            "id": self.run.id,
            "name": words(self.run.name, 120),
            "study": self.run.study,
            "status": self._status,
            "reason": words(end.reason, 1000) if end and end.reason else "",
            "synthetic": start.synthetic,
            "facts": {name: words(value) for name, value in facts.items() if value is not None},
            "round": self.round,
            "num_rounds": start.num_rounds or 0,
            "overall": self.overall.y[-1] if self.overall.y else None,
            "best": None if best is None else {"value": best[0], "round": -best[1]},
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": self.seconds,
            "joules": joules or None,
            "failures": self.num_failures,
            "privacy": list(self.privacy.values())[:MOST_TASKS],
            "missing": [words(name, 80) for name in self._missing()[:100]],
            "broken": self.tail.num_broken,
            "broken_lines": [f"line {number}: {words(reason)}" for number, reason in self.tail.broken],
            "too_large": self.tail.is_too_large,
            "read": 1.0 if not self.tail.size else min(1.0, self.tail.offset / self.tail.size),
        }

    def _curves_section(self) -> dict[str, Any]:
        names = [*self.start.tasks, *(name for name in self.series if name not in self.start.tasks)][:MOST_TASKS]
        number = 1 + sum(len(self.series.get(name, {})) for name in names)
        most = max(FEWEST_POINTS, min(MOST_POINTS, POINTS // number))
        return {
            "num_rounds": self.start.num_rounds or 0,
            "overall": self.overall.to_json(most),
            "tasks": [self._task(name, most) for name in names],
        }

    def _task(self, name: str, most: int) -> dict[str, Any]:
        facts, series = self.start.tasks.get(name.partition(":")[0]), self.series.get(name, {})
        metric = (facts.metric if facts else None) or next(iter(series), "")
        final, data = self.final.get(name), self.data.get(name)
        main = series.get(metric, Series())
        known = [(value, at) for at, value in zip(main.x, main.y, strict=True) if value is not None]
        best = None
        if known:
            chosen = min(known) if metric in _LOWER_IS_BETTER else max(known, key=lambda pair: (pair[0], -pair[1]))
            best = {"value": chosen[0], "round": chosen[1]}
        stop = self.stops.get(name)
        return {
            "name": words(name, 80),
            "kind": words(facts.kind, 40) if facts else "",
            "metric": words(metric, 40),
            "labels": [words(label, 40) for label in ((facts.labels if facts else None) or [])[:50]],
            "auxiliary": bool(facts and facts.auxiliary),
            "final": {words(key, 40): value for key, value in list(final.metrics.items())[:20]} if final else {},
            "marked": words(final.marked) if final and final.marked else "",
            "best": best,
            "train": data.train if data else None,
            "validation": data.validation if data else None,
            "stopped": stop.round if stop else None,
            "baselines": {
                words(key, 40): metrics.get(metric) for key, metrics in list(self.baselines.get(name, {}).items())[:10]
            },
            "series": {words(key, 40): line.to_json(most) for key, line in series.items()},
        }

    def _sites_section(self) -> list[dict[str, Any]]:
        return [self._row(name, site) for name, site in self.sites.items()]

    def _row(self, name: str, site: Site) -> dict[str, Any]:
        return {
            "name": words(name, 80),
            "state": self._site_state(name, site),
            "tasks": {words(task, 60): count for task, count in list(site.tasks.items())[:20]},
            "updates": site.updates,
            "failures": site.failures,
            "last": site.last_round,
            "seen": site.seen,
            "seen_at": site.seen_at,
            "reason": site.reason,
            "failed": site.failed_round,
            "up": site.bytes_up,
            "down": site.bytes_down,
            "seconds": site.seconds,
            "shares": {words(scope, 60): share for scope, share in list(site.shares.items())[:20]},
            "strip": "".join(letter for _, letter in site.strip),
        }

    def _site_state(self, name: str, site: Site) -> str:
        """A word for where the site stands; of an open round nobody knows more than who is in it."""
        failed, updated = site.failed_round, site.last_round
        if failed is not None and (updated is None or failed > updated):
            return "late" if is_late(site.reason) else "refused"
        if self._status in ("running", "waiting"):
            if self.is_opened and name in self.expected:
                return "here" if site.has_come else "awaited"
            if updated is None:
                return "training" if self.round == 0 else "idle"
            return "training" if updated >= self.round else "idle"
        return "idle" if updated is None else "finished"

    def _plan_section(self) -> dict[str, Any] | None:
        if self.plan is None:
            return None
        return {
            "round": self.plan.round,
            "tasks": [words(task, 60) for task in list(self.start.tasks)[:MOST_TASKS]],
            "groups": [
                {"name": words(name, 60), "tasks": [words(task, 60) for task in members][:MOST_TASKS]}
                for name, members in _leaves(self.plan.groups)
            ][:MOST_TASKS],
            "layers": [
                {"layer": words(one.layer, 80), "level": words(one.level, 40), "parameters": one.parameters}
                for one in self.plan.layers[:MOST_LAYERS]
            ],
            "scopes": [
                {"scope": words(one.scope, 80), "level": words(one.level, 40), "parameters": one.parameters}
                for one in self.plan.scopes[:MOST_LAYERS]
            ],
            "total": self.plan.total,
            "at_clients": self.plan.at_clients,
            "moves": list(self.moves),
        }

    def _timeline_section(self) -> list[dict[str, Any]]:
        rows = []
        for event in self.rounds:
            total, train, scored = event.seconds or 0.0, event.train_seconds or 0.0, event.evaluate_seconds or 0.0
            longest = min(event.longest_client_seconds or 0.0, train)
            rows.append(
                {
                    "round": event.round,
                    "seconds": total,
                    "clients": longest,
                    "server": max(0.0, train - longest),
                    "evaluate": scored,
                    "rest": max(0.0, total - train - scored),
                    "accepted": event.clients or 0,
                    "failed": event.failures or 0,
                }
            )
        return rows

    def _failures_section(self) -> dict[str, Any]:
        return {"number": self.num_failures, "last": list(reversed(self.failures))}

    def _config_section(self) -> list[dict[str, Any]]:
        return [
            {
                "key": words(key, 120),
                "value": words(_shown(value)),
                "default": words(_shown(default)),
                "is_default": same,
            }
            for key, value, default, same in config_rows(self.config)
        ]


def _leaves(groups: Mapping[str, Any], path: str = "", depth: int = 0) -> list[tuple[str, list[str]]]:
    """The innermost groups of a plan with the names of their tasks."""
    found: list[tuple[str, list[str]]] = []
    for name, inner in groups.items():
        if isinstance(inner, Mapping) and depth < 8:
            found += _leaves(inner, f"{path}{name}/", depth + 1)
        elif isinstance(inner, list):
            found.append((f"{path}{name}", [str(task) for task in inner]))
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def config_rows(config: Mapping[str, Any]) -> list[tuple[str, Any, Any, bool]]:
    """Every key of a config with its value, its default, and whether they are equal.

    A key that this version does not know has no default.
    """
    rows: list[tuple[str, Any, Any, bool]] = []
    _walk(config, Config, "", rows, 0)
    return rows[:MOST_KEYS]


_UNKNOWN = "(no default)"


def _walk(values: Mapping[str, Any], model: Any, path: str, rows: list[tuple[str, Any, Any, bool]], depth: int) -> None:
    fields = model.model_fields if model is not None else {}
    for key, value in values.items():
        if len(rows) >= MOST_KEYS or depth > 16:
            return
        about = fields.get(key)
        default = (
            _plain(about.get_default(call_default_factory=True)) if about and not about.is_required() else _UNKNOWN
        )
        if isinstance(value, Mapping) and value:
            inner, is_named = _model_of(about.annotation) if about else (None, False)
            for name, part in value.items() if is_named else ():
                if isinstance(part, Mapping):
                    _walk(part, inner, f"{path}{key}.{name}.", rows, depth + 1)
            if not is_named:
                _walk(value, inner, f"{path}{key}.", rows, depth + 1)
            continue
        rows.append((f"{path}{key}", value, default, about is not None and value == default))


def _plain(value: Any) -> Any:
    """A default in the types that a file has it in."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _model_of(annotation: Any) -> tuple[Any, bool]:
    """The section that a field has, also where it is one of several types, and whether there is one for each name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in reversed(getattr(annotation, "__args__", ())):
        found, is_named = _model_of(part)
        if found is not None:
            return found, is_named or getattr(annotation, "__origin__", None) in (dict, Mapping)
    return None, False
