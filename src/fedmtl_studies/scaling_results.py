"""The study of scaling: what a cell came to, and what curves say of chance, of the target, and of a collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal

from fedmtl_studies.folder import cell_name, read_record
from fedmtl_studies.library import (
    ClientsEvent,
    DataEvent,
    EvaluationEvent,
    RoundEvent,
    RunFolder,
    StartEvent,
    first_of,
    last_of,
    load_config,
    read_events,
    score,
)
from fedmtl_studies.results import Spread, recorded, spread

if TYPE_CHECKING:
    from fedmtl_studies.scaling import ScalingOptions

# What may stand before an encoder's name: a classifier as DistilBERT has one, then random values.
DENSE, RANDOM = "dense:", "random:"
# So near to chance, what a model has learnt is no more than noise.
MARGIN = 0.05
# Of the baseline's accuracy.
TARGET = 0.9
# Accuracies are shares of counted rows: less apart than this, two are equal.
ROUNDING = 1e-9

Fate = Literal["no", "never left it", "fell back to it"]
# A round; or that the target was never reached; or that there was none, the baseline being at chance itself.
Reached = int | Literal["failed", "void"]


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
        """The setup with the same encoder and task and one client."""
        return Setup(self.encoder, self.task, 1)

    def cell(self, seed: int) -> str:
        return cell_name(self.name, seed)


def encoder_label(encoder: str) -> str:
    """Return the last part of a folder's or a hub's name, behind the `dense:` and `random:` that were given."""
    name = encoder.removeprefix(DENSE).removeprefix(RANDOM)
    return encoder.removesuffix(name) + Path(name).name


def rounds_of(options: ScalingOptions, setup: Setup) -> int:
    """Return the rounds of a run: the baseline has no target to reach."""
    return (options.rounds if setup.clients == 1 else options.threshold_rounds)[setup.task]


@dataclass(frozen=True)
class Result:
    """A finished cell. `curve` is the accuracy by round, 0 before training; `chance` what one answer to all scores.

    `examples` are the fewest and the most a client has, `steps` the most it takes in a round; bytes are a round's, both
    ways.
    """

    cell: str
    curve: Mapping[int, float]
    chance: float
    examples: tuple[int, int]
    num_train: int
    num_scored: int
    is_cut: bool
    steps: int
    round_bytes: float
    train_seconds: float
    evaluate_seconds: float
    device: str
    precision: str
    cells_at_once: int


# By setup and seed; None where a cell is not finished.
Results = Mapping[Setup, Mapping[int, Result | None]]


def read_result(run: RunFolder) -> Result:
    """Read the result of a settled run of one task."""
    events = read_events(run)
    rounds = [event for event in events if isinstance(event, RoundEvent) and event.round]
    start = recorded(run, "its start", first_of(events, StartEvent))
    data = recorded(run, "its data", first_of(events, DataEvent))
    final = recorded(run, "its scores", last_of(events, EvaluationEvent))
    examples = [
        recorded(run, f"the examples of {client}", part.examples)
        for client, facts in recorded(run, "its clients", first_of(events, ClientsEvent)).clients.items()
        for part in facts.tasks.values()
    ]
    config = load_config(run.config)
    training, size = config.training, config.batch_size_of(data.task)
    moved = [recorded(run, "a round's bytes", sent) for event in rounds for sent in (event.bytes_up, event.bytes_down)]
    return Result(
        cell=run.name,
        curve={
            event.round: recorded(run, "an accuracy", event.metrics.get("accuracy"))
            for event in events
            if isinstance(event, EvaluationEvent)
        },
        chance=chance_of(recorded(run, "its confusion matrix", final.confusion)),
        examples=(min(examples), max(examples)),
        num_train=recorded(run, "its training examples", data.train),
        num_scored=recorded(run, "its validation examples", data.validation),
        is_cut=data.validation_cut,
        steps=training.local_steps or training.local_epochs * math.ceil(max(examples) / size),
        round_bytes=math.fsum(moved) / max(1, len(rounds)),
        train_seconds=math.fsum(
            recorded(run, "a round's seconds of training", event.train_seconds) for event in rounds
        ),
        evaluate_seconds=math.fsum(
            recorded(run, "a round's seconds of evaluation", event.evaluate_seconds) for event in rounds
        ),
        device=recorded(run, "its device", start.device),
        precision=recorded(run, "its precision", start.precision),
        cells_at_once=read_record(run).get("cells_at_once", 1),
    )


def chance_of(confusion: Sequence[Sequence[int]]) -> float:
    """Return what always giving the most frequent label scores: a random guess's share where labels are balanced."""
    counts = [sum(row) for row in confusion]
    return max(counts) / sum(counts)


@dataclass(frozen=True)
class Known:
    """What a study was to do and what came of it."""

    options: ScalingOptions
    results: Results

    def cells(self, setup: Setup) -> Mapping[int, Result | None]:
        return self.results.get(setup, {})

    def over(self, setup: Setup, measure: Callable[[Result], float | None]) -> Spread | None:
        """Return a number of every seed's cell; None where a cell is not finished."""
        return spread([None if cell is None else measure(cell) for cell in self.cells(setup).values()])

    def accuracy(self, setup: Setup) -> Spread | None:
        """Return the accuracy after the fixed number of rounds."""
        return self.over(setup, lambda cell: cell.curve.get(self.options.rounds[setup.task]))

    def fates(self, setup: Setup) -> dict[int, Fate]:
        """Return by seed how it stands to chance, as far as cells are finished."""
        at = self.options.rounds[setup.task]
        return {seed: fate(cell, at) for seed, cell in self.cells(setup).items() if cell is not None}

    def reached(self, setup: Setup) -> dict[int, Reached]:
        """Return by seed when it reaches the target, as far as a cell and its baseline are finished."""
        at, baselines = self.options.rounds[setup.task], self.cells(setup.baseline)
        pairs = {seed: (cell, baselines.get(seed)) for seed, cell in self.cells(setup).items()}
        return {seed: rounds_to(cell, over, at) for seed, (cell, over) in pairs.items() if cell and over}

    def chance(self, task: str) -> float | None:
        """Return chance on a task: the mean over the rows that the seeds drew."""
        cells_of = (cells for setup, cells in self.results.items() if setup.task == task)
        found = [cell.chance for cells in cells_of for cell in cells.values() if cell]
        return mean(found) if found else None


def is_at_chance(result: Result, at: int) -> bool:
    """Say whether the accuracy after that round is within the margin of chance, or below."""
    return result.curve[at] <= result.chance + MARGIN + ROUNDING


def fate(result: Result, at: int) -> Fate:
    """Say whether it is at chance after that round, and whether it had ever been better."""
    if not is_at_chance(result, at):
        return "no"
    was_better = any(not is_at_chance(result, number) for number in result.curve if 0 < number < at)
    return "fell back to it" if was_better else "never left it"


def rounds_to(result: Result, baseline: Result, at: int) -> Reached:
    """Return the first round with the target's share of what the baseline has after the round `at`."""
    if is_at_chance(baseline, at):
        return "void"
    target = TARGET * baseline.curve[at] - ROUNDING
    return next((number for number in sorted(result.curve) if number and result.curve[number] >= target), "failed")


def reached_value(reached: Mapping[int, Reached], threshold: int) -> Spread | str | None:
    """Return all seeds' rounds as one value; in words where there is none for every seed."""
    found = list(reached.values())
    if not found:
        return None
    if "void" in found:
        return "void"
    known = [float(number) for number in found if isinstance(number, int)]
    if len(known) == len(found):
        return spread(known)
    share = f" ({len(found) - len(known)} of {len(found)} seeds)" if len(found) > 1 else ""
    return f"not in {threshold}{share}"


def fate_words(fates: Mapping[int, Fate]) -> str | None:
    """Return how a setup's seeds stand to chance: one word, or how many of them."""
    found = list(fates.values())
    bad = [one for one in dict.fromkeys(found) if one != "no"]
    if not found:
        return None
    if not bad:
        return "no"
    return ", ".join(
        one if len(set(found)) == 1 else f"{one} ({found.count(one)} of {len(found)} seeds)" for one in bad
    )


@dataclass(frozen=True)
class Collapse:
    """What becomes of an encoder on a task as clients are added; `counts` are those at chance in any seed."""

    counts: tuple[int, ...]
    words: str


def collapse(known: Known, encoder: str, task: str) -> Collapse | None:
    """Say what becomes of an encoder, as far as its cells are finished; None where none is."""
    at = known.options.rounds[task]
    setups = [setup for setup in known.results if (setup.encoder, setup.task) == (encoder, task) and known.fates(setup)]
    if not setups:
        return None
    fates = {setup.clients: known.fates(setup) for setup in setups}
    bad = tuple(clients for clients, found in fates.items() if any(one != "no" for one in found.values()))
    if 1 in bad:
        return Collapse(bad, f"at chance with one client already ({fate_words(fates[1])}): more clients prove nothing")
    if not bad:
        means = {setup.clients: known.accuracy(setup) for setup in setups}
        lowest = (
            min((found.mean, clients) for clients, found in means.items() if found) if any(means.values()) else None
        )
        least = "" if lowest is None else f"; lowest {score(lowest[0])} with {lowest[1]}"
        return Collapse((), f"no collapse with up to {max(fates)} clients after {at} rounds{least}")
    kinds = {clients: fate_words(fates[clients]) for clients in bad}
    listed = " and ".join(
        f"{', '.join(str(clients) for clients, found in kinds.items() if found == kind)} clients ({kind})"
        for kind in dict.fromkeys(kinds.values())
    )
    return Collapse(bad, f"at chance after {at} rounds with {listed}{_later(known, setups, bad)}")


def _later(known: Known, setups: Sequence[Setup], bad: Sequence[int]) -> str:
    """Say whether those at chance had left it when the last round was over."""
    last = known.options.threshold_rounds[setups[0].task]
    if last == known.options.rounds[setups[0].task]:
        return ""
    still = [
        setup.clients
        for setup in setups
        if setup.clients in bad
        and any(cell is not None and is_at_chance(cell, max(cell.curve)) for cell in known.cells(setup).values())
    ]
    return f"; after {last} still with {', '.join(map(str, still))}" if still else f"; after {last} with none"
