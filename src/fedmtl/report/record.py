"""A run's events are sorted by what they are about, and each score is followed over the rounds.

What is missing or unfinished is empty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, mean
from typing import Literal, TypeVar

from fedmtl.runs.energy import total_energy
from fedmtl.runs.event_lines import Event, last_of
from fedmtl.runs.events import (
    AggregationEvent,
    BaselineEvent,
    ClientFacts,
    ClientsEvent,
    DataEvent,
    DistillationEvent,
    EarlyStopEvent,
    EndEvent,
    EnergyTotals,
    EvaluationEvent,
    ExamplePrivacyEvent,
    FailureEvent,
    PlanEvent,
    PruningEvent,
    RoundEvent,
    SharingEvent,
    StartEvent,
    TaskFacts,
    TaskWeightsEvent,
    UpdateEvent,
)
from fedmtl.runs.log import task_metrics
from fedmtl.runs.privacy import privacy_lines
from fedmtl.runs.verdicts import Verdict, verdicts

# A smaller change over the whole window is not worth a word, however steady it is.
SMALLEST_CHANGE = 0.005
FEWEST_POINTS = 4
# Student's t, two-sided 95 %, for 2, 3, ... degrees of freedom; the last one serves all larger ones.
_STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
Series = Mapping[int, float | None]
# What is known of a task that the start event does not name.
NO_FACTS = TaskFacts(kind="")
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Run:
    """What happened, by task, round and client; `end` is empty while the run has not ended."""

    name: str
    start: StartEvent
    data: dict[str, DataEvent]
    clients: dict[str, ClientFacts]
    plans: tuple[PlanEvent, ...]
    aggregation: AggregationEvent | None
    updates: tuple[UpdateEvent, ...]
    failures: tuple[FailureEvent, ...]
    evaluations: dict[str, dict[int, EvaluationEvent]]
    stops: dict[str, EarlyStopEvent]
    rounds: dict[int, RoundEvent]
    end: EndEvent
    energy: EnergyTotals | None = None
    distillations: tuple[DistillationEvent, ...] = ()
    weights: dict[int, TaskWeightsEvent] = field(default_factory=dict)
    decisions: dict[int, SharingEvent] = field(default_factory=dict)
    pruned: dict[int, PruningEvent] = field(default_factory=dict)
    baselines: tuple[BaselineEvent, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    example_privacy: ExamplePrivacyEvent | None = None
    privacy: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task that any event names, the configured ones first."""
        known = self.start.tasks
        named = {**known, **self.data, **self.evaluations}
        return tuple(name for name in named if name in known or name.partition(":")[0] not in known)

    @property
    def last_round(self) -> int:
        scored = (number for by_round in self.evaluations.values() for number in by_round)
        return max((*self.rounds, *scored), default=0)

    def task(self, name: str) -> TaskFacts:
        """What the start event says about a task, or about that of a set TASK:NAME; empty when it says nothing."""
        return self.start.tasks.get(name.partition(":")[0], NO_FACTS)

    def sets(self, task: str) -> list[str]:
        """The task's name, and TASK:NAME of its further validation sets that were scored."""
        return [task, *(name for name in self.evaluations if name.startswith(f"{task}:"))]


def gather(events: Sequence[Event], name: str) -> Run:
    """The run that `events` tell of; where two events speak of the same thing the later one holds."""
    kinds: dict[type[Event], list[Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, StartEvent | RoundEvent):
            kinds[EndEvent].clear()  # A run that goes on after its end was resumed.
        kinds[type(event)].append(event)

    def of(cls: type[Kind]) -> list[Kind]:
        return [event for event in kinds[cls] if isinstance(event, cls)]

    evaluations: dict[str, dict[int, EvaluationEvent]] = {}
    for evaluation in of(EvaluationEvent):
        evaluations.setdefault(evaluation.task, {})[evaluation.round] = evaluation
    return Run(
        name=name,
        start=last_of(events, StartEvent) or StartEvent(),
        data={event.task: event for event in of(DataEvent)},
        clients={client: facts for event in of(ClientsEvent) for client, facts in event.clients.items()},
        plans=tuple(of(PlanEvent)),
        aggregation=last_of(events, AggregationEvent),
        updates=tuple(of(UpdateEvent)),
        failures=tuple(of(FailureEvent)),
        evaluations={task: dict(sorted(by_round.items())) for task, by_round in evaluations.items()},
        stops={event.task: event for event in of(EarlyStopEvent)},
        rounds={event.round: event for event in sorted(of(RoundEvent), key=lambda event: event.round)},
        end=(of(EndEvent) or [EndEvent()])[-1],
        energy=(of(EndEvent) or [EndEvent()])[-1].energy or total_energy(events),
        distillations=tuple(of(DistillationEvent)),
        weights={event.round: event for event in of(TaskWeightsEvent)},
        decisions={event.round: event for event in of(SharingEvent)},
        pruned={event.round: event for event in of(PruningEvent)},
        baselines=tuple(of(BaselineEvent)),
        verdicts=tuple(verdicts(events, name)),
        example_privacy=last_of(events, ExamplePrivacyEvent),
        privacy=tuple(privacy_lines(events)),
    )


@dataclass(frozen=True)
class Trend:
    """The fitted change from round `first` to round `last`, and its standard error.

    `word` is empty where the change cannot be told from the scatter of the scores.
    """

    word: Literal["rising", "", "falling"]
    change: float
    error: float
    first: int
    last: int


@dataclass(frozen=True)
class Summary:
    start: float | None
    best: float | None
    best_round: int | None
    final: float | None
    final_round: int | None
    trend: Trend | None


def main_metric(run: Run, task: str) -> str:
    """The task's main metric; the first one evaluated where the start event names none."""
    evaluated = (name for event in run.evaluations.get(task, {}).values() for name in event.metrics)
    return run.task(task).metric or next(evaluated, "score")


def series(run: Run, task: str, metric: str) -> dict[int, float | None]:
    """A metric by evaluated round, None where it was undefined."""
    events = run.evaluations.get(task, {})
    return {at: event.metrics.get(metric) for at, event in events.items()}


def average(run: Run, name: Literal["overall", "classification"]) -> dict[int, float | None]:
    """An average by evaluated round: as the round event says, else the mean if every task has a score."""
    evaluated = sorted({at for by_round in run.evaluations.values() for at in by_round})
    return {at: _average(run.rounds[at], name) if at in run.rounds else _mean_at(run, name, at) for at in evaluated}


def _average(event: RoundEvent, name: Literal["overall", "classification"]) -> float | None:
    return event.overall if name == "overall" else event.classification


def _mean_at(run: Run, name: str, at: int) -> float | None:
    counted = [task for task in run.tasks if not run.task(task).auxiliary]
    if name == "classification":
        counted = [task for task in counted if "accuracy" in task_metrics(run.task(task))]
        metrics = dict.fromkeys(counted, "accuracy")
    else:
        metrics = {task: main_metric(run, task) for task in counted}
    values = [series(run, task, metric).get(at) for task, metric in metrics.items()]
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def summarize(scores: Series) -> Summary:
    """Start is round 0, best the earliest of the highest, final the last evaluation, even if undefined."""
    known = {at: value for at, value in scores.items() if value is not None}
    best_round = max(known, key=lambda at: (known[at], -at), default=None)
    final_round = max(scores, default=None)
    return Summary(
        start=scores.get(0),
        best=None if best_round is None else known[best_round],
        best_round=best_round,
        final=None if final_round is None else scores[final_round],
        final_round=final_round,
        trend=trend(known),
    )


def trend(scores: Mapping[int, float]) -> Trend | None:
    """The direction over the last third of the evaluated rounds, at least four; None when there are fewer.

    Rising or falling when the least-squares line changes by `SMALLEST_CHANGE` or more over the window and its
    slope differs from 0 at the 95 % level given the scatter about the line; without a word otherwise.
    """
    trained = sorted(at for at in scores if at > 0)
    if len(trained) < FEWEST_POINTS:
        return None
    window = trained[-max(FEWEST_POINTS, math.ceil(len(trained) / 3)) :]
    values = [scores[at] for at in window]
    slope, intercept = linear_regression(window, values)
    scatter = sum((value - intercept - slope * at) ** 2 for at, value in zip(window, values, strict=True))
    middle = mean(window)
    freedom = len(window) - 2
    error = math.sqrt(scatter / freedom / sum((at - middle) ** 2 for at in window))
    moved = slope * (window[-1] - window[0])
    certain = abs(slope) > _STUDENT[min(freedom - 2, len(_STUDENT) - 1)] * error
    word: Literal["rising", "", "falling"] = ""
    if certain and abs(moved) >= SMALLEST_CHANGE:
        word = "rising" if moved > 0 else "falling"
    return Trend(word, moved, error * (window[-1] - window[0]), window[0], window[-1])
