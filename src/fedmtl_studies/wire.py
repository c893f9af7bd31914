"""One config under several codecs: what a score costs in bytes, as a table and a page.

This study is no grid: its runs are ordinary ones in the study's folder, one after the other in this process.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmtl_studies.figures import colour
from fedmtl_studies.library import (
    EVERY,
    ONLY_SERVER,
    Config,
    ConfigError,
    EvaluationEvent,
    Frame,
    Honours,
    Html,
    RoundEvent,
    RunEvent,
    RunFolder,
    StartEvent,
    UpdateEvent,
    WireConfig,
    create_run,
    first_of,
    html_table,
    join,
    legend,
    padded,
    read_events,
    score,
    single_page,
    size,
    svg,
    tag,
    write_atomic,
    y_axis,
)
from fedmtl_studies.page import csv_text
from fedmtl_studies.results import main_metrics, recorded

DOWN, UP = (typing.get_args(WireConfig.model_fields[side].annotation) for side in ("down", "up"))
LABEL_GAP = 44
HONOURS = Honours("study wire", EVERY, {**ONLY_SERVER, "wire.down": "write --codecs", "wire.up": "write --codecs"})
CURVES = ".curve { fill: none; stroke: var(--c); stroke-width: 1.8 } .spot { fill: var(--c) }"


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
    """Read `fp32,int8,int8/topk`: one codec for both ways, or DOWN/UP."""
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
    config: Config, pairs: Sequence[Pair], name: str, observe: Callable[[Pair], Callable[[RunEvent], None]]
) -> tuple[Path, list[Point]]:
    """Run the config once per pair, with the same seed; the table and the picture are written after every run.

    `observe` gives the watcher of each run. The runs are folders inside the study's, named by their codecs.
    """
    from fedmtl_studies.computing import start_run

    if config.mode.startswith("centralized"):
        raise ConfigError(f"mode: found {config.mode}, in which nothing travels; a study of the wire needs clients")
    folder = create_run(Path(config.output), name).path
    points: list[Point] = []
    for pair in pairs:
        wire = config.wire.model_copy(update={"down": pair.down, "up": pair.up})
        run = start_run(config.model_copy(update={"wire": wire, "output": str(folder)}), pair.name, observe(pair))
        points += read_points(pair.name, run)
        write_atomic(folder / "wire.csv", to_csv(points).encode())
        write_atomic(folder / "wire.html", wire_page(name, points).encode())
    return folder, points


def read_points(codec: str, run: RunFolder) -> list[Point]:
    """Return a point for every round that was scored; bytes are summed from the start of training."""
    events = read_events(run)
    main = main_metrics(run, recorded(run, "its start", first_of(events, StartEvent)))
    points, down, up, messages = [], 0, 0, 0
    scores: dict[str, float | None] = {}
    for event in events:
        match event:
            case EvaluationEvent():
                scores[event.task] = event.metrics.get(main[event.task])
            case UpdateEvent():
                messages += 1
            case RoundEvent():
                down += recorded(run, "a round's bytes", event.bytes_down)
                up += recorded(run, "a round's bytes", event.bytes_up)
                if scores:
                    points.append(Point(codec, event.round, {"overall": event.overall, **scores}, down, up, messages))
                scores = {}
    return points


def last_points(points: Sequence[Point]) -> list[Point]:
    """Return where each codec ended."""
    return list({point.codec: point for point in points}.values())


def to_csv(points: Sequence[Point]) -> str:
    """Return one row for every codec and scored round; bytes are sums since the start."""
    columns = list(dict.fromkeys(name for point in points for name in point.scores))
    return csv_text(
        ["codec", "round", *columns, "bytes_down", "bytes_up", "updates"],
        (
            [
                point.codec,
                point.round,
                *("" if point.scores.get(name) is None else f"{point.scores[name]:.6f}" for name in columns),
                point.bytes_down,
                point.bytes_up,
                point.messages,
            ]
            for point in points
        ),
    )


def wire_page(name: str, points: Sequence[Point]) -> str:
    """Return a page that opens offline; the same points give the same text."""
    codecs = list(dict.fromkeys(point.codec for point in points))
    colours = {codec: colour(number) for number, codec in enumerate(codecs)}
    metrics = list(dict.fromkeys(metric for point in points for metric in point.scores))
    figures = (_figure(metric, points, colours) for metric in metrics)
    return single_page(
        f"{name}: score against bytes",
        tag("h1", name),
        tag("p", "What a score costs: bytes to and from all clients since the start, after every scored round."),
        legend((colours[codec], codec) for codec in codecs),
        tag("div", *figures, class_="panels"),
        tag("section", _table(points, metrics)),
        style=CURVES,
    )


def _figure(metric: str, points: Sequence[Point], colours: Mapping[str, str]) -> Html:
    known = [
        (point, value) for point in points if (value := point.scores.get(metric)) is not None and point.total_bytes
    ]
    if not known:
        return Html()
    exponents = [math.log10(point.total_bytes) for point, _ in known]
    frame = Frame((min(exponents) - 0.05, max(exponents) + 0.05), padded((value for _, value in known), 0.02))
    curves = []
    for codec, look in colours.items():
        reached = [
            (frame.across(math.log10(point.total_bytes)), frame.up(value), point, value)
            for point, value in known
            if point.codec == codec
        ]
        line = tag("polyline", class_="curve", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in reached))
        spots = (
            tag("circle", tag("title", _words(point, value)), class_="spot", cx=x, cy=y, r=2.6)
            for x, y, point, value in reached
        )
        curves.append(tag("g", line, *spots, class_=look))
    picture = svg(
        frame, metric, f"{metric} against bytes, a line for each codec", y_axis(frame), _byte_axis(frame), *curves
    )
    return tag("figure", tag("figcaption", tag("b", metric)), picture)


def _words(point: Point, value: float) -> str:
    return f"{point.codec}, round {point.round}: {score(value)} for {size(point.total_bytes)}"


def _byte_axis(frame: Frame) -> Html:
    """Draw bytes on a logarithmic scale, so that a codec four times smaller lies as far away anywhere."""
    low, high = frame.x
    shown: list[float] = []
    for at in (factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)):
        is_inside = low <= math.log10(at) <= high
        if is_inside and (not shown or _gap(frame, shown[-1], at) >= LABEL_GAP):
            shown.append(at)
    marks = (tag("text", size(at), class_="x", x=frame.across(math.log10(at)), y=frame.floor + 13) for at in shown)
    name = tag("text", "down and up", class_="x name", x=(frame.left + frame.edge) / 2, y=frame.height - 3)
    floor = tag("line", class_="axis", x1=frame.left, x2=frame.edge, y1=frame.floor, y2=frame.floor)
    return join((floor, *marks, name))


def _gap(frame: Frame, left: float, right: float) -> float:
    return frame.across(math.log10(right)) - frame.across(math.log10(left))


def _table(points: Sequence[Point], metrics: Sequence[str]) -> Html:
    ends = {point.codec: point for point in points}
    rows = [
        (codec, *(score(end.scores.get(metric)) for metric in metrics), size(end.bytes_down), size(end.bytes_up))
        for codec, end in ends.items()
    ]
    return html_table("Where each codec ended", ("codec", *metrics, "down", "up"), rows)
