"""What curves say: who is at chance, who reaches the target and when, where an encoder collapses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from fedmtl.report.formats import score
from fedmtl.study.measures import Spread, spread
from fedmtl.study.scaling.asked import Asked
from fedmtl.study.scaling.cells import Setup
from fedmtl.study.scaling.results import Result, Results

# So near to chance, a model has learnt nothing that could be told from noise.
MARGIN = 0.05
# Of the baseline's accuracy.
TARGET = 0.9
# Accuracies are shares of counted rows: less apart than this, two are equal.
ROUNDING = 1e-9

Fate = Literal["no", "never left it", "fell back to it"]
# A round; or that the target was never reached; or that there was none, the baseline being at chance itself.
Reached = int | Literal["failed", "void"]


@dataclass(frozen=True)
class Known:
    """What was asked and what came of it."""

    asked: Asked
    results: Results

    def cells(self, setup: Setup) -> Mapping[int, Result | None]:
        return self.results.get(setup, {})

    def over(self, setup: Setup, measure: Callable[[Result], float | None]) -> Spread | None:
        """A number of every seed's cell; None where a cell is not finished."""
        return spread([None if cell is None else measure(cell) for cell in self.cells(setup).values()])

    def accuracy(self, setup: Setup) -> Spread | None:
        """After the fixed number of rounds."""
        return self.over(setup, lambda cell: cell.curve.get(self.asked.rounds[setup.task]))

    def fates(self, setup: Setup) -> dict[int, Fate]:
        """By seed, as far as cells are finished."""
        at = self.asked.rounds[setup.task]
        return {seed: fate(cell, at) for seed, cell in self.cells(setup).items() if cell is not None}

    def reached(self, setup: Setup) -> dict[int, Reached]:
        """By seed, as far as a cell and its baseline are finished."""
        at, baselines = self.asked.rounds[setup.task], self.cells(setup.baseline)
        pairs = {seed: (cell, baselines.get(seed)) for seed, cell in self.cells(setup).items()}
        return {seed: rounds_to(cell, over, at) for seed, (cell, over) in pairs.items() if cell and over}

    def chance(self, task: str) -> float | None:
        """The mean over the rows that the seeds drew."""
        own = (cells for setup, cells in self.results.items() if setup.task == task)
        found = [cell.chance for cells in own for cell in cells.values() if cell]
        return mean(found) if found else None


def is_at_chance(result: Result, at: int) -> bool:
    """Whether the accuracy after that round is within the margin of chance, or below."""
    return result.curve[at] <= result.chance + MARGIN + ROUNDING


def fate(result: Result, at: int) -> Fate:
    """Whether it is at chance after that round, and whether it had ever been better."""
    if not is_at_chance(result, at):
        return "no"
    was_better = any(not is_at_chance(result, number) for number in result.curve if 0 < number < at)
    return "fell back to it" if was_better else "never left it"


def rounds_to(result: Result, baseline: Result, at: int) -> Reached:
    """The first round with the target's share of what the baseline has after the round `at`."""
    if is_at_chance(baseline, at):
        return "void"
    target = TARGET * baseline.curve[at] - ROUNDING
    return next((number for number in sorted(result.curve) if number and result.curve[number] >= target), "failed")


def reached_value(reached: Mapping[int, Reached], threshold: int) -> Spread | str | None:
    """All seeds' rounds as one value; in words where there is none for every seed."""
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
    """How a setup's seeds stand to chance: one word, or how many of them."""
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
    """In words, as far as its cells are finished; None where none is."""
    at = known.asked.rounds[task]
    setups = [setup for setup in known.results if (setup.encoder, setup.task) == (encoder, task) and known.fates(setup)]
    if not setups:
        return None
    fates = {setup.clients: known.fates(setup) for setup in setups}
    bad = tuple(clients for clients, own in fates.items() if any(one != "no" for one in own.values()))
    if 1 in bad:
        return Collapse(bad, f"at chance with one client already ({fate_words(fates[1])}): more clients prove nothing")
    if not bad:
        means = {setup.clients: known.accuracy(setup) for setup in setups}
        lowest = min((own.mean, clients) for clients, own in means.items() if own) if any(means.values()) else None
        least = "" if lowest is None else f"; lowest {score(lowest[0])} with {lowest[1]}"
        return Collapse((), f"no collapse with up to {max(fates)} clients after {at} rounds{least}")
    kinds = {clients: fate_words(fates[clients]) for clients in bad}
    listed = " and ".join(
        f"{', '.join(str(clients) for clients, own in kinds.items() if own == kind)} clients ({kind})"
        for kind in dict.fromkeys(kinds.values())
    )
    return Collapse(bad, f"at chance after {at} rounds with {listed}{_later(known, setups, bad)}")


def _later(known: Known, setups: Sequence[Setup], bad: Sequence[int]) -> str:
    """Whether those at chance had left it when the last round was over."""
    last = known.asked.threshold_rounds[setups[0].task]
    if last == known.asked.rounds[setups[0].task]:
        return ""
    still = [
        setup.clients
        for setup in setups
        if setup.clients in bad
        and any(cell is not None and is_at_chance(cell, max(cell.curve)) for cell in known.cells(setup).values())
    ]
    return f"; after {last} still with {', '.join(map(str, still))}" if still else f"; after {last} with none"
