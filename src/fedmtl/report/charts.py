"""Charts are SVG as values: scales and axes, stacked bars, and lines over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedmtl.report.formats import score, tick
from fedmtl.report.markup import Html, join, tag
from fedmtl.report.record import Series

Label = Callable[[float], str]
# Above this, hover areas are thinner than a pixel and only make the page heavy.
MOST_HOVERS = 150
_LINE_GAP = 12.0


def tick_step(span: float, target: int = 4) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts `span` into about `target` parts."""
    rough = span / target
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def ticks(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def padded(values: Iterable[float], smallest_span: float) -> tuple[float, float]:
    """A range around `values` with some air, never so narrow that noise fills the picture."""
    low, high = min(known := list(values), default=0.0), max(known, default=0.0)
    missing = max(0.0, smallest_span - (high - low)) / 2
    air = 0.06 * max(high - low, smallest_span)
    return low - missing - air, high + missing + air


@dataclass(frozen=True)
class Frame:
    """A plot of `width` x `height` with margins, over the data ranges `x` and `y`."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 320
    height: float = 190
    left: float = 40
    right: float = 12
    top: float = 14
    bottom: float = 30

    @property
    def floor(self) -> float:
        return self.height - self.bottom

    @property
    def edge(self) -> float:
        return self.width - self.right

    def across(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / (high - low) * (self.edge - self.left)

    def up(self, value: float) -> float:
        low, high = self.y
        return self.floor - (value - low) / (high - low) * (self.floor - self.top)


def svg(frame: Frame, title: str, description: str, *content: object) -> Html:
    """A picture that says what it shows to those who do not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *content,
        role="img",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
    )


def y_axis(frame: Frame, label: Label | None = None, target: int = 4) -> Html:
    """Horizontal hairlines with their values."""
    step = tick_step(frame.y[1] - frame.y[0], target)
    lines = (
        tag("line", class_="grid", x1=frame.left, x2=frame.edge, y1=frame.up(at), y2=frame.up(at))
        for at in ticks(*frame.y, step)
    )
    values = (
        tag("text", label(at) if label else tick(at, step), class_="y", x=frame.left - 6, y=frame.up(at) + 3.5)
        for at in ticks(*frame.y, step)
    )
    return join((*lines, *values))


def x_axis(frame: Frame, words: str, whole: bool = True) -> Html:
    """Values along the floor, whole numbers only where they are rounds, and what they are, if `words` say."""
    low, high = frame.x
    step = tick_step(high - low, 6)
    if whole:
        step = max(1.0, math.ceil(step))
    marks = (
        tag("text", tick(at, step), class_="x", x=frame.across(at), y=frame.floor + 13) for at in ticks(low, high, step)
    )
    centre = (frame.left + frame.edge) / 2
    name = tag("text", words, class_="x name", x=centre, y=frame.height - 3) if words else Html()
    floor = tag("line", class_="axis", x1=frame.left, x2=frame.edge, y1=frame.floor, y2=frame.floor)
    return join((floor, *marks, name))


@dataclass(frozen=True)
class Bar:
    """A bar from `left` to `right`; segments are (value, CSS class), and negative ones hang down."""

    left: float
    right: float
    segments: tuple[tuple[float, str], ...]
    words: str


def bar_range(bars: Sequence[Bar]) -> tuple[float, float]:
    """The y range that holds every stack and zero."""
    ups = (sum(value for value, _ in bar.segments if value > 0) for bar in bars)
    downs = (sum(value for value, _ in bar.segments if value < 0) for bar in bars)
    low, high = min(downs, default=0.0), max(ups, default=0.0)
    return (low * 1.04, high * 1.04) if high > low else (0.0, 1.0)


def bar_chart(
    frame: Frame,
    bars: Sequence[Bar],
    *,
    title: str,
    description: str,
    axis: Html,
    label: Label | None = None,
) -> Html:
    """Bars over hairlines; `axis` is drawn below them."""
    zero = tag("line", class_="axis", x1=frame.left, x2=frame.edge, y1=frame.up(0), y2=frame.up(0))
    drawn = (_bar(frame, bar) for bar in bars)
    return svg(frame, title, description, y_axis(frame, label), *drawn, zero, axis)


def _bar(frame: Frame, bar: Bar) -> Html:
    left, right = frame.across(bar.left), frame.across(bar.right)
    ends = {True: 0.0, False: 0.0}
    pieces = []
    for value, colour in bar.segments:
        if not value:
            continue
        start = ends[value > 0]
        ends[value > 0] = start + value
        top, bottom = sorted((frame.up(start), frame.up(start + value)))
        pieces.append(
            tag(
                "rect",
                class_=colour,
                x=left,
                width=max(right - left, 0.5),
                y=top,
                height=max(bottom - top, 0.3),
            )
        )
    return tag("g", tag("title", bar.words), join(pieces), class_="bar")


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
        _hovers(frame, lines, axis or "round"),
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


def _hovers(frame: Frame, lines: Sequence[Line], axis: str) -> Html:
    rounds = sorted({at for line in lines for at in line.scores})
    if len(rounds) > MOST_HOVERS:
        return Html()
    half = (frame.edge - frame.left) / (frame.x[1] - frame.x[0]) / 2
    areas = []
    for at in rounds:
        values = [f"{line.name} {score(line.scores[at])}" for line in reversed(lines) if at in line.scores]
        area = tag(
            "rect",
            tag("title", f"{axis} {at}: " + ", ".join(values)),
            x=frame.across(at) - half,
            y=frame.top,
            width=2 * half,
            height=frame.floor - frame.top,
        )
        areas.append(area)
    return tag("g", *areas, class_="hover")
