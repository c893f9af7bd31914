"""A run's events are summed up here: what it came to (`summarize`) and how far it is (`run_status`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_record, read_record
from fedmtl.runs.energy import total_energy
from fedmtl.runs.event_lines import Event, first_of, last_of
from fedmtl.runs.events import (
    ClientFacts,
    ClientsEvent,
    ConfigEvent,
    DataEvent,
    EarlyStopEvent,
    EndEvent,
    EnergyTotals,
    EvaluationEvent,
    ExpectedEvent,
    FailureEvent,
    PlanEvent,
    PrivacyEvent,
    RoundEvent,
    SecureAggregationEvent,
    SiteEvent,
    StartEvent,
    TaskFacts,
    UpdateEvent,
)
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.runs.privacy import unfinished

_LOWER_IS_BETTER = frozenset({"mse", "rmse", "mae"})

Metrics = dict[str, float | None]
# Which round of a run: the best, the last, or one by its number.
Round = str | int
BEST, LAST = "best", "last"


@dataclass(frozen=True)
class Best:
    """The best value of a metric and the first round that reached it."""

    value: float
    round: int


def parse_round(given: Round) -> Round:
    """`best`, `last` or a round's number, which may be written in digits; anything else is an error."""
    if given in (BEST, LAST):
        return given
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 10:
        return int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise FedmtlError(f"--round {given}: is no round; write best, last, or a round's number")


def best_overall(events: Iterable[Event]) -> Best | None:
    """The best overall score of a run and the first round that has it; None where no round has one."""
    return _best("overall", [(event.overall, event.round) for event in events if isinstance(event, RoundEvent)])


def early_stops(events: Iterable[Event]) -> dict[str, EarlyStopEvent]:
    """The tasks that were stopped early, each with its event."""
    return {event.task: event for event in events if isinstance(event, EarlyStopEvent)}


def task_rounds(events: Sequence[Event], given: Round, name: str = "the run") -> dict[str, int]:
    """The round that each task's model is of: with `best` a stopped task's best one, and for others the run's."""
    start, given = first_of(events, StartEvent), parse_round(given)
    tasks = list(start.tasks) if start else []
    finished = [event.round for event in events if isinstance(event, RoundEvent)]
    if given != BEST:
        number = max(finished, default=0) if given == LAST else given
        return dict.fromkeys(tasks, int(number))
    best = best_overall(events)
    stopped = {task: event.best_round for task, event in early_stops(events).items() if event.best_round is not None}
    if best is None and set(tasks) - set(stopped):
        raise FedmtlError(f"--round best: no round of {name} has an overall score; write --round last, or a number")
    return {task: stopped[task] if task in stopped or best is None else best.round for task in tasks}


class TestScore(BaseModel):
    """What the model of a task after a round scored on a test set."""

    __test__ = False  # for pytest
    model_config = ConfigDict(frozen=True, extra="forbid")

    set: str
    round: int
    examples: int
    metrics: dict[str, float | None]


class _TestScores(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    scores: list[TestScore]


def note_test_scores(run: RunFolder, scores: Sequence[TestScore]) -> None:
    """Write scores on test sets into the run's folder, over earlier ones of the same sets and rounds."""
    new = {(score.set, score.round) for score in scores}
    earlier = [score for score in read_test_scores(run) if (score.set, score.round) not in new]
    write_atomic(run.test_scores, _TestScores(scores=[*earlier, *scores]).model_dump_json(indent=1).encode())


def read_test_scores(run: RunFolder) -> list[TestScore]:
    """The scores on test sets that the run's folder has; none where nobody asked for them."""
    if not run.test_scores.is_file():
        return []
    remedy = "remove it, and run `fedmtl evaluate RUN --test` again"
    return parse_record(_TestScores, read_record(run.test_scores, remedy), str(run.test_scores), remedy).scores


@dataclass(frozen=True)
class ClientFailure:
    """A client whose contribution to a round was lost, and why."""

    round: int
    client: str
    reason: str | None


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
class AverageSummary:
    """An average over the tasks at its first, best and last evaluation; None is undefined."""

    start: float | None
    best: Best | None
    final: float | None


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers.

    `parameters` counts all values, at the server and at clients; `rounds` counts rounds of training;
    `status` is `unfinished` without an end.
    """

    name: str
    mode: str
    status: str
    synthetic: bool
    tasks: dict[str, TaskSummary]
    overall: float | None
    classification: float | None
    averages: dict[str, AverageSummary]
    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int
    failures: tuple[ClientFailure, ...]
    parameters: int | None
    weights_sha256: str | None
    energy: EnergyTotals | None = None
    stops: dict[str, EarlyStopEvent] = field(default_factory=dict)
    # Further validation sets, TASK:NAME, which count for no average.
    further: dict[str, TaskSummary] = field(default_factory=dict)

    @property
    def scored(self) -> dict[str, TaskSummary]:
        """Every task, each followed by its further validation sets."""
        found: dict[str, TaskSummary] = {}
        for task, result in self.tasks.items():
            found[task] = result
            found |= {name: more for name, more in self.further.items() if name.startswith(f"{task}:")}
        return found

    def to_json(self) -> dict[str, Any]:
        """What `fedmtl run --json` prints."""
        return {
            "name": self.name,
            "mode": self.mode,
            "metrics": {name: task.final for name, task in self.tasks.items()},
            "further": {name: task.final for name, task in self.further.items()},
            "averages": {name: asdict(average) for name, average in self.averages.items()},
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
            "failures": [asdict(failure) for failure in self.failures],
            "weights_sha256": self.weights_sha256,
            "energy": None if self.energy is None else asdict(self.energy),
        }


def summarize(events: Sequence[Event], name: str = "", round: Round | None = None) -> RunSummary:
    """The summary of a run, finished or not; bytes and seconds count every round.

    With a round, `final`, `overall` and `classification` are of that round, which must have been scored.
    """
    summary = _summarize(events, name)
    return summary if round in (None, LAST) else _at_round(summary, events, round or 0)


def _at_round(summary: RunSummary, events: Sequence[Event], given: Round) -> RunSummary:
    rounds = task_rounds(events, given, summary.name)
    scored = {(event.task, event.round): event for event in events if isinstance(event, EvaluationEvent)}
    for task, number in rounds.items():
        if (task, number) not in scored:
            known = sorted(at for name, at in scored if name == task)
            raise FedmtlError(
                f"--round {given}: {summary.name} was not scored after round {number}; it was after"
                f" {', '.join(map(str, known)) or 'none'}"
            )
    tasks = {
        name: replace(task, final=dict(event.metrics), marked=event.marked)
        for name, task in summary.tasks.items()
        if (event := scored[name, rounds[name]])
    }
    further = {
        name: replace(result, final=dict(found.metrics), marked=found.marked)
        for name, result in summary.further.items()
        if (found := scored.get((name, rounds[name.partition(":")[0]])))
    }
    start = last_of(events, StartEvent) or StartEvent()
    counted = [task for name, task in tasks.items() if not start.tasks[name].auxiliary]
    return replace(
        summary,
        tasks=tasks,
        further=further,
        overall=_mean([task.final.get(task.metric) for task in counted]),
        classification=_mean([task.final["accuracy"] for task in counted if "accuracy" in task.final]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _summarize(events: Sequence[Event], name: str) -> RunSummary:
    start = last_of(events, StartEvent) or StartEvent()
    plan, end = last_of(events, PlanEvent), last_of(events, EndEvent) or EndEvent()
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    scored = [event for event in events if isinstance(event, EvaluationEvent)]
    train = {event.task: event.train for event in events if isinstance(event, DataEvent)}
    averaged = [event for event in rounds if event.averages is not None]
    return RunSummary(
        name=name,
        mode=start.mode or "",
        status="unfinished" if end.status is None else end.status,
        synthetic=start.synthetic,
        tasks={
            task: _summarize_task(
                facts, [event for event in scored if event.task == task], passes(train.get(task), rounds, task)
            )
            for task, facts in start.tasks.items()
        },
        overall=averaged[-1].overall if averaged else None,
        classification=averaged[-1].classification if averaged else None,
        averages=_summarize_averages(averaged),
        rounds=max((event.round for event in rounds), default=0),
        seconds=end.seconds or sum(event.seconds or 0.0 for event in rounds),
        bytes_up=sum(event.bytes_up or 0 for event in rounds),
        bytes_down=sum(event.bytes_down or 0 for event in rounds),
        failures=tuple(
            ClientFailure(event.round, event.client, event.reason)
            for event in events
            if isinstance(event, FailureEvent)
        ),
        parameters=None if plan is None or plan.total is None else plan.total + plan.at_clients,
        weights_sha256=end.weights_sha256,
        energy=end.energy or total_energy(events),
        stops=early_stops(events),
        further={
            name: _summarize_task(facts, [event for event in scored if event.task == name], None)
            for task, facts in start.tasks.items()
            for name in dict.fromkeys(event.task for event in scored if event.task.startswith(f"{task}:"))
        },
    )


def passes(train: float | None, rounds: Iterable[RoundEvent], task: str) -> float | None:
    """Examples of the task that were trained on, over the `train` there are; None where either was not recorded."""
    counts = [event.seen for event in rounds if event.seen is not None]
    return sum(seen.get(task, 0) for seen in counts) / train if train and counts else None


def _summarize_task(facts: TaskFacts, scored: Sequence[EvaluationEvent], num_passes: float | None) -> TaskSummary:
    metrics = list(dict.fromkeys(metric for event in scored for metric in event.metrics))
    return TaskSummary(
        kind=facts.kind,
        metric=facts.metric or "",
        start=dict(scored[0].metrics) if scored else {},
        best={
            metric: _best(metric, [(event.metrics.get(metric), event.round) for event in scored]) for metric in metrics
        },
        final=dict(scored[-1].metrics) if scored else {},
        marked=scored[-1].marked if scored else None,
        passes=num_passes,
    )


def _summarize_averages(rounds: Sequence[RoundEvent]) -> dict[str, AverageSummary]:
    series = {
        "overall": [(event.overall, event.round) for event in rounds],
        "classification": [(event.classification, event.round) for event in rounds],
    }
    return {
        name: AverageSummary(values[0][0], _best(name, values), values[-1][0])
        for name, values in series.items()
        if values
    }


def _best(metric: str, values: Sequence[tuple[float | None, int]]) -> Best | None:
    defined = [(value, number) for value, number in values if value is not None]
    if not defined:
        return None
    # min and max return the first of equals, so a tie is won by the earlier round.
    choose = min if metric in _LOWER_IS_BETTER else max
    return Best(*choose(defined, key=lambda pair: pair[0]))


# Among so few, what was averaged shows what one of them returned.
FEW_CLIENTS = 2


def exposed(events: Sequence[Event]) -> str | None:
    """One line about what is averaged over one or two clients, where its change is one client's update; None if none.

    It counts the clients that have examples, and in rounds with fewer of them those that returned. What stays at a
    client or never moves is not averaged, nor is anything in a mode that is no federation.
    """
    start, plan = last_of(events, StartEvent), last_of(events, PlanEvent)
    if start is None or plan is None or not (start.mode or "").startswith("federated"):
        return None
    clients = {client: set(facts.tasks) for client, facts in _clients(events).items()}
    level = {layer.layer: layer.level for layer in plan.layers}
    counts: dict[str, int] = {}
    for task in start.tasks:
        if level.get(f"heads.{task}", "client") not in ("client", "fixed"):
            counts[f"the head of {task}"] = sum(task in tasks for tasks in clients.values())
    for scope in plan.scopes:
        tasks = _scope_tasks(scope.scope, start.tasks, plan.groups)
        if scope.level not in ("client", "fixed") and f"the head of {scope.scope.partition(':')[2]}" not in counts:
            counts[f"scope {scope.scope}"] = sum(bool(tasks & has) for has in clients.values())
    settings = last_of(events, ConfigEvent)
    has_noise = settings is not None and (settings.config.get("privacy") or {}).get("client")
    for event in events:
        # Under noise it matters who might have returned, not who did.
        for part in event.aggregated if isinstance(event, RoundEvent) and not has_noise else ():
            name = f"scope {part.scope}" if part.head is None else f"the head of {part.head}"
            if name in counts:
                counts[name] = min(counts[name], part.clients)
    few = [f"{name} ({count})" for name, count in counts.items() if 0 < count <= FEW_CLIENTS]
    if not few:
        return None
    hidden = ", under the noise of privacy.client" if has_noise else ""
    return (
        f"averaged over one or two clients: {', '.join(few)}; there the value after a round minus the value before is"
        f" that client's update, or that of two together{hidden}; have more clients, or leave it at its client"
        " (level client in sharing.rules)"
    )


def _clients(events: Sequence[Event]) -> dict[str, ClientFacts]:
    return {name: facts for event in events if isinstance(event, ClientsEvent) for name, facts in event.clients.items()}


def _scope_tasks(scope: str, tasks: Iterable[str], groups: Mapping[str, Any]) -> set[str]:
    """The tasks whose clients share a scope."""
    kind, _, rest = scope.partition(":")
    if kind == "task":
        return {rest}
    inside: Any = groups
    for part in rest.split("/") if kind == "group" else ():
        inside = inside.get(part, []) if isinstance(inside, Mapping) else []
    return set(_members(inside)) if kind == "group" else set(tasks)


def _members(tree: Any) -> list[str]:
    return [task for inner in tree.values() for task in _members(inner)] if isinstance(tree, Mapping) else list(tree)


def protection(events: Sequence[Event]) -> list[str]:
    """What protected updates in the rounds so far, one statement for each protection, with what it does not cover."""
    masked = [event for event in events if isinstance(event, SecureAggregationEvent)]
    trained = [event for event in masked if event.purpose == "train"]
    noisy = {event.unit: event.words for event in events if isinstance(event, PrivacyEvent)}
    stated = [*noisy.values(), *(unfinished(events) if noisy else ())]
    if not masked:
        return stated
    least = min(count for event in masked for count in event.opened.values())
    closed = sum(len(event.closed) for event in masked)
    stayed = f", {closed} sums of fewer stayed closed" if closed else ""
    error = max((event.error or 0.0 for event in trained), default=0.0)
    return [
        *stated,
        f"secure aggregation: in {len(trained)} rounds the server opened sums over {least} clients or more and no"
        f" single update{stayed}; a mean is within {error:.1g} of the plain one in each entry; not covered: what a sum"
        " itself tells, who takes part and how long it takes, the numbers of examples, labels and tokens that a client"
        " declares when it joins, and a client that sends something else than its update",
    ]


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
    """`status` is that of the end, or `waiting`, `running` or `killed` where there is none.

    `missing` are the sites without an update in the last round, or, before round 1, those that have not come; each with
    the round of its last update, which is None where there is none. `privacy` has a line for each protection,
    and one for what is averaged over so few clients that it shows what they returned.
    """

    name: str
    status: str
    rounds: int
    num_rounds: int
    sites: Mapping[str, SiteStatus]
    last_failure: ClientFailure | None
    energy: EnergyTotals | None = None
    missing: Mapping[str, int | None] = field(default_factory=dict)
    privacy: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_status(events: Sequence[Event], name: str, *, is_busy: bool = True) -> RunStatus:
    """How far a run is: its rounds, and every client so far; `is_busy` says that a process is at work in its folder."""
    come: set[str] = set()
    expected: set[str] = set()
    sites: dict[str, SiteStatus] = {}
    status, rounds, num_rounds = "waiting", 0, 0
    last_failure: ClientFailure | None = None
    for event in events:
        match event:
            case StartEvent():
                num_rounds = event.num_rounds or 0
            case ClientsEvent():
                for client, facts in event.clients.items():
                    sites.setdefault(client, SiteStatus(tuple(facts.tasks)))
            case ExpectedEvent():
                expected, come = expected | set(event.clients), set()
            case SiteEvent(client=client):
                come.add(client)
                expected.add(client)
                sites[client] = replace(sites.get(client, SiteStatus()), tasks=tuple(event.tasks))
            case RoundEvent():
                status, rounds = "running", event.round
            case UpdateEvent(client=client):
                sites[client] = _updated(sites.get(client, SiteStatus(tuple(event.tasks))), event)
            case FailureEvent(client=client):
                before = sites.get(client, SiteStatus())
                sites[client] = replace(before, failures=before.failures + 1)
                last_failure = ClientFailure(event.round, client, event.reason or "")
            case EndEvent():
                status = event.status or ""
    spent = (last_of(events, EndEvent) or EndEvent()).energy or total_energy(events)
    if status in ("waiting", "running") and not is_busy:
        status = "killed"
    missing: dict[str, int | None] = {}
    for client in sorted(expected):
        last = sites[client].last_round if client in sites else None
        is_there = client in come if rounds == 0 else last is not None and last >= rounds
        if status != "done" and not is_there:
            missing[client] = last
    few = exposed(events)
    privacy = (*protection(events), *([few] if few else []))
    return RunStatus(name, status, rounds, num_rounds, sites, last_failure, spent, missing, privacy)


def _updated(before: SiteStatus, event: UpdateEvent) -> SiteStatus:
    return replace(
        before,
        updates=before.updates + 1,
        last_round=event.round,
        bytes_up=before.bytes_up + (event.bytes_up or 0),
        bytes_down=before.bytes_down + (event.bytes_down or 0),
        seconds=before.seconds + (event.seconds or 0.0),
    )
