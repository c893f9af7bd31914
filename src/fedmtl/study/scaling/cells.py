"""Every cell of a study of scaling: an encoder, a task and a number of clients that share the same examples.

The paper: A. Hilmkil, S. Callh, M. Barbieri, L. R. Sütfeld, E. Listo Zec, O. Mogren, "Scaling Federated Learning for
Fine-tuning of Large Language Models", NLDB 2021. Where we differ:

* Every cell with several clients runs to the second threshold; the accuracy at the first is read on the way, which is
  the same run since no rate depends on the number of rounds.
* The baseline is the one-client federation of the same seed; chance is what the most frequent label scores.
* A client begins every round with a fresh optimizer, the one client too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.config.file import with_absolute_paths, with_overrides
from fedmtl.study.grid import Cell
from fedmtl.study.rates import rate_for
from fedmtl.study.scaling.asked import Asked, encoder_label, encoder_settings, read_partition
from fedmtl.study.setups import Settings, cell_name, fits
from fedmtl.tasks.sources import find_table

# What a task is scored on: an official split of its own, in this order.
SCORED = ("dev", "validation", "test")


@dataclass(frozen=True)
class Setup:
    """One point of the figures; `encoder` is its label."""

    encoder: str
    task: str
    clients: int

    @property
    def name(self) -> str:
        return f"{self.encoder.replace(':', '-')}-{self.task}-{self.clients}"

    @property
    def baseline(self) -> Setup:
        """The same with one client."""
        return Setup(self.encoder, self.task, 1)

    def cell(self, seed: int) -> str:
        return cell_name(self.name, seed)


def wanted_setups(asked: Asked) -> list[Setup]:
    """All that are asked for, as tables show them: by task, encoder and number of clients."""
    every = (
        Setup(encoder_label(encoder), task, clients)
        for task in asked.tasks
        for encoder in asked.encoders
        for clients in sorted(asked.clients)
    )
    return [setup for setup in every if fits(setup.name, asked.rows)]


def seeds_of(asked: Asked, setup: Setup) -> tuple[int, ...]:
    """All seeds where its name fits one of `seed_rows`, else the first alone."""
    return asked.seeds if fits(setup.name, asked.seed_rows) else asked.seeds[:1]


def make_cells(asked: Asked) -> list[Cell]:
    """In the order in which they say most if there is no time for all: a seed's baselines, then its many clients."""
    base = base_settings(asked)
    encoders = {encoder_label(encoder): encoder for encoder in asked.encoders}
    return [
        _cell(asked, base, encoders[setup.encoder], setup, seed)
        for seed in asked.seeds
        for setup in _by_weight(asked)
        if seed in seeds_of(asked, setup)
    ]


def _by_weight(asked: Asked) -> Iterator[Setup]:
    yield from sorted(wanted_setups(asked), key=lambda setup: (setup.clients > 1, -setup.clients))


def base_settings(asked: Asked) -> Settings:
    """What all cells have in common, the user's data and overrides included."""
    base: Settings = dict(asked.config)
    if asked.data is not None:
        base["data"] = {**base.get("data", {}), "root": asked.data, "source": "files"}
    return with_overrides(with_absolute_paths(base, Path.cwd()), asked.overrides)


def rounds_of(asked: Asked, setup: Setup) -> int:
    """The rounds of a run: the baseline has no target to reach."""
    return (asked.rounds if setup.clients == 1 else asked.threshold_rounds)[setup.task]


def _cell(asked: Asked, base: Settings, encoder: str, setup: Setup, seed: int) -> Cell:
    rounds, rate = rounds_of(asked, setup), rate_for(asked.rates, setup.name)
    own: dict[str, Settings] = {
        "model": encoder_settings(encoder),
        "training": {"num_rounds": rounds, "schedule": "constant", **({} if rate is None else {"learning_rate": rate})},
        "federation": {"clients_per_task": setup.clients},
        "partition": read_partition(asked.partition),
        "evaluation": {"every": 1},
    }
    settings = {**base, **{name: {**(base.get(name) or {}), **section} for name, section in own.items()}}
    given = (base.get("tasks") or {}).get(setup.task) or {}
    settings |= {"seed": seed, "tasks": {setup.task: {**given, **_task(asked, setup.task)}}}
    # Each client is a model to send and to average, whatever it trains on.
    work = rounds * ((asked.examples or 25_000) + 100 * setup.clients)
    return Cell(setup.cell(seed), with_absolute_paths(settings, Path.cwd()), work=float(work))


def _task(asked: Asked, task: str) -> Settings:
    sizes = {"train_samples": asked.examples, "val_samples": asked.validation}
    return {**sizes, **({} if asked.data is None else {"source": _source(asked, task)})}


def _source(asked: Asked, task: str) -> dict[str, Any]:
    folder = Path(asked.data or "") / task
    # A file that is not there is named by the run that wants it.
    train = find_table(folder, ["train"]) or folder / "train.tsv.gz"
    scored = scored_file(asked, task)
    return {"train": str(train), **({} if scored is None else {"validation": str(scored)})}


def scored_file(asked: Asked, task: str) -> Path | None:
    """The official rows that nobody trains on; None where a part of train is held back instead.

    Test rows may be read here: a fixed number of rounds ends every run, and nothing is chosen by what it scores.
    """
    if asked.data is None or asked.score_on != "official":
        return None
    return find_table(Path(asked.data) / task, SCORED)
