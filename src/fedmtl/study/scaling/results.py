"""What a cell of the study of scaling came to, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedmtl.config.file import load_config
from fedmtl.runs.folder import RunFolder, read_events
from fedmtl.study.folder import StudyFolder
from fedmtl.study.record import is_settled, read_record, record_path
from fedmtl.study.scaling.asked import Asked
from fedmtl.study.scaling.cells import Setup, seeds_of, wanted_setups


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


def read_results(folder: StudyFolder, asked: Asked) -> Results:
    """All that is finished of what is asked for."""
    results: dict[Setup, dict[int, Result | None]] = {}
    for setup in wanted_setups(asked):
        runs = {seed: folder.cell(setup.cell(seed)) for seed in seeds_of(asked, setup)}
        results[setup] = {seed: _read_once(run) if is_settled(run) else None for seed, run in runs.items()}
    return results


def _read_once(run: RunFolder) -> Result:
    # All are asked for whenever one ends, and a settled one does not change.
    return _remembered(run, record_path(run).stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def _remembered(run: RunFolder, settled: int) -> Result:
    return read_result(run)


def read_result(run: RunFolder) -> Result:
    """The result of a settled run of one task."""
    events = read_events(run)
    evaluations = [event for event in events if event["event"] == "evaluation"]
    rounds = [event for event in events if event["event"] == "round" and event["round"]]
    start, data = (_first(events, kind) for kind in ("start", "data"))
    held = [part["examples"] for own in _first(events, "clients")["clients"].values() for part in own["tasks"].values()]
    config = load_config(run.config)
    training, size = config.training, config.batch_size_of(data["task"])
    moved = math.fsum(event["bytes_up"] + event["bytes_down"] for event in rounds)
    return Result(
        cell=run.name,
        curve={event["round"]: event["metrics"]["accuracy"] for event in evaluations},
        chance=chance_of(evaluations[-1]["confusion"]),
        examples=(min(held), max(held)),
        num_train=data["train"],
        num_scored=data["validation"],
        is_cut=data["validation_cut"],
        steps=training.local_steps or training.local_epochs * math.ceil(max(held) / size),
        round_bytes=moved / max(1, len(rounds)),
        train_seconds=math.fsum(event["train_seconds"] for event in rounds),
        evaluate_seconds=math.fsum(event["evaluate_seconds"] for event in rounds),
        device=start["device"],
        precision=start["precision"],
        cells_at_once=read_record(run).get("cells_at_once", 1),
    )


def chance_of(confusion: Sequence[Sequence[int]]) -> float:
    """What always giving the most frequent label scores: a random guess's share where labels are balanced."""
    counts = [sum(row) for row in confusion]
    return max(counts) / sum(counts)


def _first(events: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return next(event for event in events if event["event"] == kind)
