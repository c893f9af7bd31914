"""Stacked bars, upwards and downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Html, join, tag
from .scales import Frame, Label, svg, y_axis


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
