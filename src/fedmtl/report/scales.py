"""From data to drawing: round tick values, and a frame that places points in an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .formats import tick
from .markup import Html, join, tag

Label = Callable[[float], str]


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
