"""Every setup of the study of federated against centralized, and which table shows it.

What is rebuilt: "Performance Comparison: Federated MTL vs Published Tiny BERT", a comparison of a federation of three
clients (sst2, qqp, stsb; 300 samples each; 30 rounds) with numbers of other models from the literature. The point
`original` has its samples, clients and rounds.
Where we differ:

* What a federation is compared with are runs of the same model on the same examples, as often.
* A base point (all samples, iid, three clients per task) and lines through it, not the whole product; every mode at
  every point.
* Official dev sets, Pearson's r for similarity; a score of another name stands under that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedmtl.study.federated.asked import Asked

FEDERATED, CENTRALIZED, LOCAL = "federated", "centralized", "local"
MODES = (FEDERATED, "federated-single-task", CENTRALIZED, "centralized-single-task", LOCAL)
# What else the package offers a federation.
VARIANTS: dict[str, dict[str, Any]] = {
    "federated-fedadam": {"federation": {"server_optimizer": {"kind": "fedadam", "learning_rate": 5e-3}}},
    "federated-prox": {"training": {"proximal": 0.1}},
    "federated-weighted": {"federation": {"average": "weighted"}},
    "federated-uniform": {"federation": {"average": "uniform"}},
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
# What acceptance asks for runs first, with all its seeds.
FIRST = (BASE, LONG, "dirichlet-0.5")


@dataclass(frozen=True)
class Point:
    """Where modes are compared: samples a client (None is all), Dirichlet's alpha (None is iid), clients of a task."""

    name: str
    words: str
    rounds: int
    samples: int | None = None
    alpha: float | None = None
    clients: int = CLIENTS
    rate: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What it changes in the base; how many samples a task has stands with its task."""
        partition = {} if self.alpha is None else {"partition": {"kind": "dirichlet", "alpha": self.alpha}}
        rounds = {"training": {"num_rounds": self.rounds}}
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


def points(asked: Asked) -> list[Point]:
    """The base and the lines through it; with rates to choose from, the base once for each."""
    base = Point(BASE, "all samples, iid, 3 clients per task", asked.rounds)
    if asked.choose:
        return [
            replace(base, name=f"rate-{rate:g}", words=f"learning rate {rate:g}", rate=rate) for rate in asked.choose
        ]
    few = min(asked.samples, default=300)
    return [
        base,
        Point(LONG, f"as the base, {asked.long_rounds} rounds", asked.long_rounds),
        *(replace(base, name=f"dirichlet-{a:g}", words=f"Dirichlet {a:g}", alpha=a) for a in asked.alphas),
        *(replace(base, name=f"samples-{n}", words=f"{n:,} samples a client", samples=n) for n in asked.samples),
        replace(base, name=FEW, words="1 client per task", clients=1),
        Point(
            ORIGINAL, f"{few} samples, 1 client per task, {asked.long_rounds} rounds", asked.long_rounds, few, None, 1
        ),
    ]


def kinds_at(point: Point) -> list[str]:
    """All modes, and other federations where they are to help: iid, at Dirichlet 0.5, and over many rounds."""
    if point.name == LONG:
        return [FEDERATED, *VARIANTS]
    return [*MODES, *(VARIANTS if point.name in FIRST or point.rate is not None else ())]


def setups(asked: Asked) -> dict[str, Setup]:
    """Every setup by its name."""
    return {
        (name := f"{point.name}-{kind}"): Setup(name, point, kind, f"{_twin(point, kind)}-{kind}")
        for point in points(asked)
        for kind in kinds_at(point)
    }


def _twin(point: Point, kind: str) -> str:
    """In one place it does not matter how the same examples were dealt, or to how many."""
    is_dealt_otherwise = point.alpha is not None or point.name == FEW
    return BASE if kind.startswith(CENTRALIZED) and is_dealt_otherwise else point.name


def lines(asked: Asked) -> dict[int, list[str]]:
    """The points of each table that compares modes, in its order."""
    return {
        1: [BASE],
        2: [BASE, *(f"dirichlet-{a:g}" for a in asked.alphas)],
        3: [*(f"samples-{n}" for n in asked.samples), BASE],
        4: [FEW, BASE],
        6: list(FIRST),
    }


def at(every: Sequence[Setup], point: str) -> list[Setup]:
    return [setup for setup in every if setup.point.name == point]
