"""The page of a study of codecs: a picture of score against bytes for every task, and a table of where each ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from fedmtl.report.charts import Frame, padded, svg, y_axis
from fedmtl.report.formats import score, size
from fedmtl.report.markup import Html, join, legend, table, tag
from fedmtl.report.single_page import single_page

COLOURS = 7
LABEL_GAP = 44
CURVES = ".curve { fill: none; stroke: var(--c); stroke-width: 1.8 } .spot { fill: var(--c) }"


class Reached(Protocol):
    """A codec's scores after a round, and the bytes that had travelled by then."""

    @property
    def codec(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def scores(self) -> Mapping[str, float | None]: ...
    @property
    def bytes_down(self) -> int: ...
    @property
    def bytes_up(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


def wire_page(name: str, points: Sequence[Reached]) -> str:
    """A page that opens offline; the same points give the same text."""
    codecs = list(dict.fromkeys(point.codec for point in points))
    colours = {codec: f"class{number % COLOURS}" for number, codec in enumerate(codecs)}
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


def _figure(metric: str, points: Sequence[Reached], colours: Mapping[str, str]) -> Html:
    known = [
        (point, value) for point in points if (value := point.scores.get(metric)) is not None and point.total_bytes
    ]
    if not known:
        return Html()
    exponents = [math.log10(point.total_bytes) for point, _ in known]
    frame = Frame((min(exponents) - 0.05, max(exponents) + 0.05), padded((value for _, value in known), 0.02))
    curves = []
    for codec, colour in colours.items():
        own = [
            (frame.across(math.log10(point.total_bytes)), frame.up(value), point, value)
            for point, value in known
            if point.codec == codec
        ]
        line = tag("polyline", class_="curve", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in own))
        spots = (
            tag("circle", tag("title", _words(point, value)), class_="spot", cx=x, cy=y, r=2.6)
            for x, y, point, value in own
        )
        curves.append(tag("g", line, *spots, class_=colour))
    picture = svg(
        frame, metric, f"{metric} against bytes, a line for each codec", y_axis(frame), _byte_axis(frame), *curves
    )
    return tag("figure", tag("figcaption", tag("b", metric)), picture)


def _words(point: Reached, value: float) -> str:
    return f"{point.codec}, round {point.round}: {score(value)} for {size(point.total_bytes)}"


def _byte_axis(frame: Frame) -> Html:
    """Bytes on a scale of powers, so that a codec four times smaller lies as far away anywhere."""
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


def _table(points: Sequence[Reached], metrics: Sequence[str]) -> Html:
    ends = {point.codec: point for point in points}
    rows = [
        (codec, *(score(end.scores.get(metric)) for metric in metrics), size(end.bytes_down), size(end.bytes_up))
        for codec, end in ends.items()
    ]
    return table("Where each codec ended", ("codec", *metrics, "down", "up"), rows)
