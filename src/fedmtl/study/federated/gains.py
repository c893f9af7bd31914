"""What taking part is worth to each client: the shared model's score beside that of the client's own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from fedmtl.study.federated.cells import LOCAL, VARIANTS, Setup
from fedmtl.study.federated.results import Result, difference
from fedmtl.study.federated.tables import Known
from fedmtl.study.measures import Spread
from fedmtl.study.tables import Column, Table, Value

SHARED = ("federated", "federated-single-task", *VARIANTS)
GAIN_NOTES = (
    "A client's own model and the shared one are scored on the same validation examples of its task, after the last"
    " round. Above is of all clients of all finished seeds; gains are in points. A client whose own score is undefined"
    " is not counted. The last column: yes is with every seed, else the mean of a client's seeds decides; what a"
    " client has is dealt anew with every seed.",
    "With one client per task, local is trained on all examples of the task.",
)


@dataclass(frozen=True)
class Gain:
    """A client beside a shared model; `points` is how far that is above its own."""

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
    """Of every client and seed for which both runs are finished."""
    for seed, alone in known.results.get(f"{setup.point.name}-{LOCAL}", {}).items():
        shared = known.results.get(setup.name, {}).get(seed)
        if alone is not None and shared is not None:
            yield from _of_seed(setup, seed, alone, shared)


def _of_seed(setup: Setup, seed: int, alone: Result, shared: Result) -> Iterator[Gain]:
    for task, own in alone.clients.items():
        for client, score in own.items():
            examples = alone.examples[task].get(client, 0)
            yield Gain(setup, seed, task, client, examples, score, shared.score(task))


def shared_setups(known: Known) -> list[Setup]:
    """The shared models that stand beside clients alone at their point."""
    beside = {setup.point.name for setup in known.setups if setup.kind == LOCAL}
    return [setup for setup in known.setups if setup.kind in SHARED and setup.point.name in beside]


def gain_table(known: Known) -> Table | None:
    """Of every shared model, how many clients it is better for, and the least and the mean gain."""
    rows = shared_setups(known)
    if not rows:
        return None
    columns = [Column("point", "point", "words"), Column("mode", "kind", "words")]
    for task in known.tasks:
        columns += [
            Column(f"{task}: above", f"{task}_above", "words"),
            Column("smallest", f"{task}_smallest", "number"),
            Column("mean", f"{task}_mean", "number"),
        ]
    columns.append(Column("for every client", "every", "words"))
    made = tuple(_row(setup, known) for setup in rows)
    return Table("table5", "Table 5: gain over local, by client", tuple(columns), made, GAIN_NOTES)


def _row(setup: Setup, known: Known) -> tuple[Value, ...]:
    found = list(gains(known, setup))
    values: list[Value] = [setup.point.words, setup.kind]
    for task in known.tasks:
        own = [gain.points for gain in found if gain.task == task and gain.points is not None]
        values += [f"{sum(one > 0 for one in own)} of {len(own)}", *(_plain(f(own)) for f in (min, mean))] if own else [
            None, None, None,
        ]  # fmt: skip
    return (*values, _every(found))


def _every(found: Sequence[Gain]) -> str | None:
    """Whether each client gains: with every seed, or on the mean of its seeds."""
    by_client: dict[tuple[str, str], list[float]] = {}
    for gain in found:
        if gain.points is not None:
            by_client.setdefault((gain.task, gain.client), []).append(gain.points)
    if not by_client:
        return None
    if all(min(points) > 0 for points in by_client.values()):
        return "yes"
    return "on the mean of seeds" if all(mean(points) > 0 for points in by_client.values()) else "no"


def _plain(value: float) -> Spread:
    return Spread(value, None, 1)


def clients_csv(known: Known) -> str:
    """A row for every client, seed and shared model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["point", "kind", "seed", "task", "client", "examples", "local", "shared", "points"])
    for setup in shared_setups(known):
        for gain in gains(known, setup):
            who = (setup.point.name, setup.kind, gain.seed, gain.task, gain.client, gain.examples)
            writer.writerow([*who, gain.alone, gain.shared, gain.points])
    return text.getvalue()
