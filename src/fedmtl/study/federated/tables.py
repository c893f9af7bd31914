"""The tables of the study of federated against centralized that compare modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedmtl.study.federated.cells import CENTRALIZED, MODES, VARIANTS, WORDS, Setup
from fedmtl.study.federated.results import Result, Results, over_seeds, overall, points_above
from fedmtl.study.measures import Spread
from fedmtl.study.tables import Column, Table, Value

TITLES = {
    1: "Table 1: all samples, iid, three clients per task",
    2: "Table 2: skewed labels",
    3: "Table 3: samples per client",
    4: "Table 4: one or three clients per task",
    6: "Table 6: other federations",
}
NOTES = {
    1: (
        "Examples are those seen by all clients together: every mode sees the same ones as often. Steps are those of"
        " all clients; in a row are those of the client that makes most.",
        "Local is the mean of the clients' own models, each scored on all validation examples of its task.",
        "Where nothing is averaged, the optimizer is kept from round to round.",
    ),
    2: ("In one place it does not matter how examples were dealt: centralized rows are those of the base.",),
    3: ("A task has three clients; 300 samples a client are 900 examples of each task.",),
    4: (
        "Local with one client per task is a model for each task on all its examples, as centralized single-task.",
        "Centralized rows of one client per task are those of the base.",
    ),
    6: ("Each as the federation of its point but for what is named; rates are in the table of cells.",),
}


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

    def named(self, point: str, kind: str) -> Setup | None:
        return next((one for one in self.setups if one.point.name == point and one.kind == kind), None)

    def score_of(self, task: str) -> Callable[[Result], float | None]:
        return lambda result: result.score(task)


def compared_table(number: int, points: Sequence[str], known: Known) -> Table | None:
    """Every mode at these points, with its distance to centralized; None where no row is wanted."""
    kinds = MODES if number != 6 else ("federated", *VARIANTS)
    rows = [setup for name in points for kind in kinds if (setup := known.named(name, kind)) is not None]
    if not rows or (number == 6 and not any(setup.kind in VARIANTS for setup in rows)):
        return None
    columns = [
        Column("point", "point", "words"), Column("mode", "kind", "words"),
        *(column for task, metric in known.metrics.items() for column in _score_columns(task, metric)),
        Column("mean", "mean"), Column("examples", "examples", "count"), Column("steps", "steps", "count"),
        Column("in a row", "steps_in_a_row", "count"), Column("training", "seconds", "seconds"),
        Column("computed", "computed", "words"),
    ]  # fmt: skip
    made = tuple(_row(setup, known) for setup in rows)
    return Table(f"table{number}", TITLES[number], tuple(columns), made, (*NOTES[number], *_shared(rows, known)))


def _score_columns(task: str, metric: str) -> tuple[Column, Column]:
    return (
        Column(f"{task} {metric}", f"{task}_{metric}"),
        Column(f"{task}, points to centralized", f"{task}_to_centralized", "number"),
    )


def _row(setup: Setup, known: Known) -> tuple[Value, ...]:
    results, tasks = known.results, known.tasks
    other = f"{setup.point.name}-{CENTRALIZED}"
    words = WORDS.get(setup.kind)
    values: list[Value] = [setup.point.words, f"{setup.kind}: {words}" if words else setup.kind]
    for task in tasks:
        values.append(over_seeds(results, setup.name, known.score_of(task)))
        is_same = setup.kind == CENTRALIZED
        values.append(None if is_same else points_above(results, setup.name, other, known.score_of(task)))
    budget = [
        over_seeds(results, setup.name, measure)
        for measure in (
            lambda one: float(one.budget.examples),
            lambda one: float(one.budget.steps),
            lambda one: float(one.budget.steps_in_a_row),
            lambda one: one.budget.seconds,
        )
    ]
    first = next((one for one in results.get(setup.name, {}).values() if one is not None), None)
    whole = over_seeds(results, setup.name, lambda one: overall(one, tasks))
    return (*values, whole, *budget, first.budget.computed if first else None)


def _shared(rows: Sequence[Setup], known: Known) -> list[str]:
    cells = [one for setup in rows for one in known.results.get(setup.name, {}).values() if one is not None]
    most = max((one.budget.cells_at_once for one in cells), default=1)
    return [f"Seconds were taken with up to {most} cells at once on the machine."] if most > 1 else []


def rates_table(known: Known) -> Table:
    """Every kind with every rate it was tried with, and the line that says which to take."""
    columns = (
        Column("mode", "kind", "words"), Column("learning rate", "learning_rate", "words"),
        *(Column(f"{task} {metric}", f"{task}_{metric}") for task, metric in known.metrics.items()),
        Column("mean", "mean"), Column("", "is_best", "words"),
    )  # fmt: skip
    best = best_rates(known)
    made = [
        (
            setup.kind, f"{setup.point.rate:g}",
            *(over_seeds(known.results, setup.name, known.score_of(task)) for task in known.tasks),
            _overall(setup, known), "best" if best.get(setup.kind) == setup.point.rate else None,
        )
        for kind in dict.fromkeys(setup.kind for setup in known.setups)
        for setup in known.setups
        if setup.kind == kind
    ]  # fmt: skip
    notes = ["Scores are of a tenth cut from train; dev was not looked at."]
    if best:
        notes.append(f"Then: --rate {','.join(f'{kind}={rate:g}' for kind, rate in best.items())}")
    edges = [kind for kind, rate in best.items() if rate in _ends(known)]
    notes += [f"At an end of what was tried: {', '.join(edges)}."] if edges else []
    return Table("rates", "Learning rates", columns, tuple(made), tuple(notes))


def _overall(setup: Setup, known: Known) -> Spread | None:
    return over_seeds(known.results, setup.name, lambda one: overall(one, known.tasks))


def _ends(known: Known) -> tuple[float, ...]:
    tried = [setup.point.rate for setup in known.setups if setup.point.rate is not None]
    return (min(tried), max(tried)) if tried else ()


def best_rates(known: Known) -> dict[str, float]:
    """By kind the rate with the best mean of all tasks, of those that have one so far; of equals the smallest."""
    found: dict[str, dict[float, float]] = {}
    for setup in known.setups:
        reached = _overall(setup, known)
        if setup.point.rate is not None and reached is not None:
            found.setdefault(setup.kind, {})[setup.point.rate] = reached.mean
    return {kind: max(own.items(), key=lambda one: (one[1], -one[0]))[0] for kind, own in found.items()}
