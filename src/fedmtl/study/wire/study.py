"""One config under several codecs: what a score costs in bytes."""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.config import Config, WireConfig
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import create_run, read_events, write_atomic
from fedmtl.study.wire.page import wire_page

DOWN, UP = (typing.get_args(WireConfig.model_fields[side].annotation) for side in ("down", "up"))


@dataclass(frozen=True)
class Pair:
    """A codec for each direction."""

    down: str
    up: str

    @property
    def name(self) -> str:
        return self.down if self.down == self.up else f"{self.down}-{self.up}"


@dataclass(frozen=True)
class Point:
    """What a run had reached after a round, and what had travelled for it, in and out of all clients."""

    codec: str
    round: int
    scores: dict[str, float | None]
    bytes_down: int
    bytes_up: int
    messages: int

    @property
    def total_bytes(self) -> int:
        return self.bytes_down + self.bytes_up


def parse_pairs(text: str) -> list[Pair]:
    """`fp32,int8,int8/topk`: one codec for both ways, or DOWN/UP."""
    pairs = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        down, _, up = word.partition("/")
        up = up or down
        if down not in DOWN or up not in UP:
            raise ConfigError(
                f"--codecs: found {word}; write names such as int8, or DOWN/UP such as int8/topk,"
                f" with {', '.join(DOWN)} down and {', '.join(UP)} up"
            )
        pairs.append(Pair(down, up))
    if not pairs:
        raise ConfigError("--codecs: names no codec; write names such as fp32,int8")
    return list(dict.fromkeys(pairs))


def study_wire(
    config: Config, pairs: Sequence[Pair], name: str, observe: Callable[[Pair], Callable[[dict[str, Any]], None]]
) -> tuple[Path, list[Point]]:
    """Run the config once per pair, with the same seed; the table and the picture are written after every run.

    `observe` gives the watcher of each run. The runs are folders inside the study's, named by their codecs.
    """
    if config.mode.startswith("centralized"):
        raise ConfigError(f"mode: found {config.mode}, in which nothing travels; a study of the wire needs clients")
    folder = create_run(Path(config.output), name).path
    points: list[Point] = []
    for pair in pairs:
        wire = config.wire.model_copy(update={"down": pair.down, "up": pair.up})
        run = start_run(config.model_copy(update={"wire": wire, "output": str(folder)}), pair.name, observe(pair))
        points += read_points(pair.name, read_events(run))
        write_atomic(folder / "wire.csv", to_csv(points).encode())
        write_atomic(folder / "wire.html", wire_page(name, points).encode())
    return folder, points


def read_points(codec: str, events: Sequence[dict[str, Any]]) -> list[Point]:
    """A point for every round that was scored; bytes are summed from the start of training."""
    main = {
        task: about["metric"] for event in events if event["event"] == "start" for task, about in event["tasks"].items()
    }
    points, down, up, messages = [], 0, 0, 0
    scores: dict[str, float | None] = {}
    for event in events:
        if event["event"] == "evaluation":
            scores[event["task"]] = event["metrics"].get(main[event["task"]])
        messages += event["event"] == "update"
        if event["event"] == "round":
            down, up = down + event["bytes_down"], up + event["bytes_up"]
            if scores:
                points.append(
                    Point(codec, event["round"], {"overall": event.get("overall"), **scores}, down, up, messages)
                )
            scores = {}
    return points


def last_points(points: Sequence[Point]) -> list[Point]:
    """Where each codec ended."""
    return list({point.codec: point for point in points}.values())


def to_csv(points: Sequence[Point]) -> str:
    """One row for every codec and scored round; bytes are sums since the start."""
    columns = list(dict.fromkeys(name for point in points for name in point.scores))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["codec", "round", *columns, "bytes_down", "bytes_up", "updates"])
    for point in points:
        scores = ("" if point.scores.get(name) is None else f"{point.scores[name]:.6f}" for name in columns)
        writer.writerow([point.codec, point.round, *scores, point.bytes_down, point.bytes_up, point.messages])
    return text.getvalue()
