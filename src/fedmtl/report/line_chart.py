"""Lines over rounds, named at their right end, with marks at single rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .formats import score
from .markup import Html, join, tag
from .scales import Frame, svg, x_axis, y_axis
from .scores import Series

# Above this, hover areas are thinner than a pixel and only make the page heavy.
MOST_HOVERS = 150
_LINE_GAP = 12.0


@dataclass(frozen=True)
class Line:
    """One line; `light` ones stand back. Undefined values leave a gap."""

    name: str
    scores: Series
    light: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at a round, with words."""

    at: int
    words: str


def line_chart(
    frame: Frame,
    lines: Sequence[Line],
    *,
    title: str,
    description: str,
    marks: Sequence[Mark] = (),
    ring: tuple[int, float] | None = None,
    axis: str = "",
) -> Html:
    """Lines in drawing order, the main one last; `ring` circles one point."""
    best = tag("circle", class_="ring", cx=frame.across(ring[0]), cy=frame.up(ring[1]), r=5.0) if ring else Html()
    return svg(
        frame,
        title,
        description,
        y_axis(frame, target=5 if frame.height > 150 else 3),
        x_axis(frame, axis),
        *(_mark(frame, mark) for mark in marks),
        *(_path(frame, line) for line in lines),
        best,
        _names(frame, lines),
        _hovers(frame, lines),
    )


def _path(frame: Frame, line: Line) -> Html:
    look = "line light" if line.light else "line"
    pieces: list[list[str]] = [[]]
    for at, value in line.scores.items():
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{frame.across(at):.1f},{frame.up(value):.1f}")
    drawn = (tag("polyline", class_=look, points=" ".join(points)) for points in pieces if len(points) > 1)
    # A lone point has no line; draw every point while there are few.
    few = len(line.scores) <= 30 and not line.light
    lone = {points[0] for points in pieces if len(points) == 1}
    spots = [xy for points in pieces for xy in points if few or xy in lone]
    dots = (tag("circle", class_=f"dot {look}", cx=xy.split(",")[0], cy=xy.split(",")[1], r=2.2) for xy in spots)
    return join((*drawn, *dots))


def _mark(frame: Frame, mark: Mark) -> Html:
    x = frame.across(mark.at)
    right = x > (frame.left + frame.edge) / 2
    return join(
        (
            tag("line", class_="mark", x1=x, x2=x, y1=frame.top - 6, y2=frame.floor),
            tag(
                "text",
                mark.words,
                class_="mark end" if right else "mark",
                x=x + 2 if right else x - 2,
                y=frame.top - 9,
            ),
        )
    )


def _names(frame: Frame, lines: Sequence[Line]) -> Html:
    """Names beside the last value of each line, pushed apart where they would touch."""
    ends = []
    for line in lines:
        known = [value for value in line.scores.values() if value is not None]
        if known:
            ends.append((frame.up(known[-1]), line))
    ends.sort(key=lambda end: end[0])
    placed: list[tuple[float, Line]] = []
    for y, line in ends:
        placed.append((max(y, placed[-1][0] + _LINE_GAP) if placed else y, line))
    excess = max(0.0, placed[-1][0] - frame.floor) if placed else 0.0
    return join(
        tag(
            "text",
            line.name,
            class_="series light" if line.light else "series",
            x=frame.edge + 9,
            y=y - excess + 3.5,
        )
        for y, line in placed
    )


def _hovers(frame: Frame, lines: Sequence[Line]) -> Html:
    rounds = sorted({at for line in lines for at in line.scores})
    if len(rounds) > MOST_HOVERS:
        return Html()
    half = (frame.edge - frame.left) / (frame.x[1] - frame.x[0]) / 2
    areas = []
    for at in rounds:
        values = [f"{line.name} {score(line.scores[at])}" for line in reversed(lines) if at in line.scores]
        area = tag(
            "rect",
            tag("title", f"round {at}: " + ", ".join(values)),
            x=frame.across(at) - half,
            y=frame.top,
            width=2 * half,
            height=frame.floor - frame.top,
        )
        areas.append(area)
    return tag("g", *areas, class_="hover")
