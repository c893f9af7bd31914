"""The study of federated against centralized: its setups, what a cell came to, and what clients gain by taking part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedmtl_studies.folder import read_record
from fedmtl_studies.library import (
    ClientsEvent,
    EvaluationEvent,
    RoundEvent,
    RunEvent,
    RunFolder,
    StartEvent,
    UpdateEvent,
    first_of,
    load_config,
    read_events,
)
from fedmtl_studies.results import Results as ResultsOf
from fedmtl_studies.results import Spread, beside, main_metrics, recorded

FEDERATED, CENTRALIZED, LOCAL = "federated", "centralized", "local"
MODES = (FEDERATED, "federated-single-task", CENTRALIZED, "centralized-single-task", LOCAL)
# What else the package offers a federation.
VARIANTS: dict[str, dict[str, Any]] = {
    "federated-fedadam": {"federation": {"server_optimizer": {"kind": "fedadam", "learning_rate": 5e-3}}},
    "federated-prox": {"training": {"proximal": 0.1}},
    "federated-weighted": {"federation": {"aggregation": {"average": "weighted"}}},
    "federated-uniform": {"federation": {"aggregation": {"average": "uniform"}}},
    "federated-constant": {"training": {"schedule": "constant", "warmup_rounds": 0.0}},
}
WORDS = {
    "federated-fedadam": "FedAdam at the server, rate 0.005",
    "federated-prox": "FedProx, mu 0.1",
    "federated-weighted": "clients weighted by examples, of whatever task",
    "federated-uniform": "clients alike, whatever their examples",
    "federated-constant": "a constant learning rate",
}
CLIENTS = 3
BASE, FEW, ORIGINAL, LONG = "base", "clients-1", "original", "long"
# These points run first, with all their seeds.
FIRST = (BASE, LONG, "dirichlet-0.5")


@dataclass(frozen=True)
class Point:
    """Where modes are compared: samples a client (None is all), Dirichlet's alpha (None is iid), clients of a task.

    With `is_given` a user's config says all of that.
    """

    name: str
    words: str
    rounds: int
    samples: int | None = None
    alpha: float | None = None
    clients: int = CLIENTS
    rate: float | None = None
    is_given: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it changes in the base, but for the samples, which stand with each task."""
        partition = {} if self.alpha is None else {"partition": {"kind": "dirichlet", "alpha": self.alpha}}
        rounds = {"training": {"num_rounds": self.rounds}}
        if self.is_given:
            return rounds
        return {"federation": {"clients_per_task": self.clients}, **rounds, **partition}


@dataclass(frozen=True)
class Setup:
    """A kind of run at a point; `cell` is the setup whose cell it is, itself unless it would be the same run again."""

    name: str
    point: Point
    kind: str
    cell: str

    @property
    def mode(self) -> str:
        return FEDERATED if self.kind in VARIANTS else self.kind.replace("-", "_")


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

    `clients` has each client's score after the last round where every client has its model, `examples` how
    many examples of the task it has.
    """

    cell: str
    metrics: Mapping[str, Mapping[str, float | None]]
    curves: Mapping[str, Mapping[int, float | None]]
    clients: Mapping[str, Mapping[str, float | None]]
    examples: Mapping[str, Mapping[str, int]]
    budget: Budget

    def score(self, task: str) -> float | None:
        """Return the main metric after the last round."""
        curve = self.curves.get(task, {})
        return curve[max(curve)] if curve else None

    def best(self, task: str) -> tuple[int, float] | None:
        """Return the first round after which the main metric was highest, and that score."""
        known = {number: value for number, value in self.curves.get(task, {}).items() if number and value is not None}
        return max(known.items(), key=lambda one: (one[1], -one[0]), default=None)


Results = ResultsOf[Result]


def read_result(run: RunFolder) -> Result:
    """Read the result of a finished run."""
    events = read_events(run)
    start = recorded(run, "its start", first_of(events, StartEvent))
    main = main_metrics(run, start)
    scored = [event for event in events if isinstance(event, EvaluationEvent)]
    last = {event.task: event for event in scored}
    clients = recorded(run, "its clients", first_of(events, ClientsEvent)).clients
    return Result(
        cell=run.name,
        metrics={task: dict(event.metrics) for task, event in last.items()},
        curves={
            task: {event.round: _main(event, main[task]) for event in scored if event.task == task} for task in main
        },
        clients={task: dict(event.clients) for task, event in last.items() if event.clients is not None},
        examples={
            task: {
                client: recorded(run, f"the examples of {client}", facts.tasks[task].examples)
                for client, facts in clients.items()
                if task in facts.tasks
            }
            for task in main
        },
        budget=_budget(run, start, events),
    )


def _main(event: EvaluationEvent, metric: str) -> float | None:
    """Return a task's score; of several models, scored on the same examples, the mean of their scores."""
    if event.clients is None:
        return event.metrics.get(metric)
    known = [score for score in event.clients.values() if score is not None]
    return mean(known) if known and len(known) == len(event.clients) else None


def _budget(run: RunFolder, start: StartEvent, events: Sequence[RunEvent]) -> Budget:
    config = load_config(run.config)
    training = config.training
    steps: dict[str, int] = {}
    for update in (event for event in events if isinstance(event, UpdateEvent)):
        made = training.local_steps or training.local_epochs * sum(
            math.ceil(recorded(run, "an update's examples", trained.examples) / config.batch_size_of(task))
            for task, trained in update.tasks.items()
        )
        steps[update.client] = steps.get(update.client, 0) + made
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    return Budget(
        learning_rate=training.learning_rate,
        examples=sum(event.samples or 0 for event in rounds),
        steps=sum(steps.values()),
        steps_in_a_row=max(steps.values(), default=0),
        seconds=math.fsum(recorded(run, "a round's seconds of training", event.train_seconds) for event in rounds),
        computed=_computed(run, start),
        cells_at_once=read_record(run).get("cells_at_once", 1),
    )


def _computed(run: RunFolder, start: StartEvent) -> str:
    """Return where and how a run computed, in words."""
    device, precision = recorded(run, "its device", start.device), recorded(run, "its precision", start.precision)
    return f"{device}, {precision}" + (f", up to {start.stack} clients at once" if start.stack else "")


def overall(result: Result, tasks: Iterable[str]) -> float | None:
    """Return the mean of the tasks' main metrics; None where one is undefined."""
    found = [result.score(task) for task in tasks]
    known = [value for value in found if value is not None]
    return mean(known) if known and len(known) == len(found) else None


def points_above(results: Results, setup: str, other: str, measure: Callable[[Result], float | None]) -> Spread | None:
    """Return by how many hundredths a measure is above another setup's, seed by seed; None while one is missing."""
    return beside(results, setup, other, lambda one, two: difference(measure(one), measure(two)))


def difference(score: float | None, other: float | None) -> float | None:
    """Return a difference in points, that is hundredths."""
    return None if score is None or other is None else 100 * (score - other)


@dataclass(frozen=True)
class Known:
    """What tables are made of: the setups that are wanted, every task's main metric, and the results so far."""

    setups: Sequence[Setup]
    metrics: Mapping[str, str]
    results: Results

    @property
    def tasks(self) -> list[str]:
        return list(self.metrics)

    @property
    def regressions(self) -> list[str]:
        return [task for task, metric in self.metrics.items() if metric in ("pearson", "spearman")]

    def at(self, point: str) -> list[Setup]:
        return [setup for setup in self.setups if setup.point.name == point]

    def named(self, point: str, kind: str) -> Setup | None:
        return next((one for one in self.setups if one.point.name == point and one.kind == kind), None)

    def score_of(self, task: str) -> Callable[[Result], float | None]:
        return lambda result: result.score(task)


SHARED = (FEDERATED, "federated-single-task", *VARIANTS)


@dataclass(frozen=True)
class Gain:
    """A client beside a shared model; `points` is how far that is above its model."""

    setup: Setup
    seed: int
    task: str
    client: str
    examples: int
    alone: float | None
    shared: float | None

    @property
    def points(self) -> float | None:
        return difference(self.shared, self.alone)


def gains(known: Known, setup: Setup) -> Iterator[Gain]:
    """Yield the gain of every client with every seed for which both runs are finished."""
    for seed, alone in known.results.get(f"{setup.point.name}-{LOCAL}", {}).items():
        shared = known.results.get(setup.name, {}).get(seed)
        if alone is not None and shared is not None:
            yield from _of_seed(setup, seed, alone, shared)


def _of_seed(setup: Setup, seed: int, alone: Result, shared: Result) -> Iterator[Gain]:
    for task, scores in alone.clients.items():
        for client, score in scores.items():
            examples = alone.examples[task].get(client, 0)
            yield Gain(setup, seed, task, client, examples, score, shared.score(task))


def shared_setups(known: Known) -> list[Setup]:
    """Return the shared models that stand beside clients alone at their point."""
    beside = {setup.point.name for setup in known.setups if setup.kind == LOCAL}
    return [setup for setup in known.setups if setup.kind in SHARED and setup.point.name in beside]


@dataclass(frozen=True)
class Printed:
    """A row: what was scored and how, and the scores of sentiment, paraphrase and similarity where they were printed.

    `closeness` is max(0, 1 - MSE) of scores divided by 5, which the comparison calls accuracy.
    """

    words: str
    how: str
    sentiment: float | None = None
    paraphrase: float | None = None
    pearson: float | None = None
    closeness: float | None = None


_CUT = "cut from GLUE's train, best round of each"
PRINTED = (
    Printed("printed: federated, best (rounds 12, 29, 2)", _CUT, 0.816, 0.830, None, 0.9309),
    Printed("printed: federated, round 30", "cut from GLUE's train", 0.800, 0.828, None, 0.8877),
    Printed("the training mean for every pair", "the same split", None, None, None, 0.9142),
    Printed("printed: 'published Tiny BERT', sst2", "GLUE test; TinyBERT-4, 14.5M, distilled", 0.930),
    Printed("printed: 'published Tiny BERT', qqp", "GLUE test; F1, not accuracy", None, 0.711),
    Printed("printed: 'published Tiny BERT', stsb", "GLUE test; Spearman, not Pearson", None, None, 0.85),
    Printed("its author's best, 3 clients, all data", "cut from GLUE's train", 0.927, 0.848, 0.683),
    Printed("bert-tiny, centralized (Turc et al.)", "GLUE test", 0.832, 0.834, 0.743),
)
PRINTED_NOTES = (
    "The printed 93.09% for STS-B is max(0, 1 - MSE) of scores divided by 5. Predicting the training mean for every"
    " pair has 91.42% there: its best round is 1.7 points above a constant, and its last round, 88.77%, is below it.",
    "Row N there is scored before round N: the best score, of round 2, is that of a model after one round, whose"
    " answers are still near the mean. Later they leave it, and squared errors grow wherever they leave it"
    " in the wrong direction; that is our reading. Whether pairs are ranked right is what Pearson's r says.",
    "The qqp of 71.1% it compares with is F1 in the papers, the sst2 of 93% another model's: what it calls better or"
    " worse than centralized compares unlike things. Its own centralized QQP is MRPC.",
    "Scores on a split cut from train are optimistic for sst2, whose phrases overlap. qqp here is public parts of Quora"
    " Question Pairs, not GLUE's split, where the data folder is the project's.",
    "Ours, best: each task at its best round, as there; optimistic, as it is chosen by the examples it is"
    " scored on. A saved model is that of the last round.",
)
WHY = (
    "Final is the score of the one model that a run saves: after the last round, all tasks. Best is over all rounds.",
    "Why it may fall: an encoder is where its tasks pull it to, and as the learning rate falls to zero those win that"
    " make most steps (our reading); a small task makes few. It is held by its weight (tasks.stsb.weight), by more and"
    " smaller steps (tasks.stsb.batch_size), and best by a last layer of its own (sharing.rules). By examples"
    " (federated-weighted) stsb has a twentieth of the say.",
)
