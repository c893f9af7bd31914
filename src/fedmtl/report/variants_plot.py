"""One picture shows size, latency and accuracy of all variants: left is fast, up is good, small is a small file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedmtl.compress.measure.measured import Load, Measured, Teacher, mean, retentions
from fedmtl.report.charts import Frame, padded, svg, tick_step, ticks, y_axis
from fedmtl.report.formats import score, size
from fedmtl.report.markup import Html, join, tag

# Of the style sheet's 11 pixels in a wide sans-serif.
LETTER, HEIGHT = 6.6, 13.0
GAP = 4.0
DISTANCES = (0.0, 10.0, 22.0, 36.0, 52.0, 70.0)
ANGLES = (0, 180, 270, 90, 315, 45, 225, 135)
COLOURS = 7
LARGEST, SMALLEST = 20.0, 3.0
LABEL_GAP = 40.0
FEWEST_MARKS = 3
PLOT_STYLE = """
.variant { fill: var(--c); fill-opacity: .55; stroke: var(--c); stroke-width: 1.2 }
.leader { stroke: var(--quiet); stroke-width: .7 } svg text.label { fill: var(--ink) }
"""


@dataclass(frozen=True)
class Dot:
    """A circle with a name."""

    x: float
    y: float
    radius: float
    name: str


@dataclass(frozen=True)
class Box:
    """A rectangle in the picture, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def position_labels(dots: Sequence[Dot], inside: Box) -> list[Box]:
    """A box for each name: the nearest free one, or, where there is none, the one that covers least."""
    taken = [Box(dot.x - dot.radius, dot.y - dot.radius, dot.x + dot.radius, dot.y + dot.radius) for dot in dots]
    placed: dict[int, Box] = {}
    # From the top down: a name that has to give way then moves in an order that a reader can follow.
    for number in sorted(range(len(dots)), key=lambda number: (dots[number].y, dots[number].x)):
        box = min(_label_boxes(dots[number]), key=lambda box: _cost(box, taken, inside))
        placed[number] = box
        taken.append(box)
    return [placed[number] for number in range(len(dots))]


def _label_boxes(dot: Dot) -> Iterator[Box]:
    """Boxes around a dot, the nearest first; `min` keeps the first of equals."""
    wide = LETTER * len(dot.name)
    for distance in DISTANCES:
        for angle in ANGLES:
            across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            reach = dot.radius + GAP + distance
            middle_x = dot.x + across * (reach + wide / 2)
            middle_y = dot.y + down * (reach + HEIGHT / 2)
            yield Box(middle_x - wide / 2, middle_y - HEIGHT / 2, middle_x + wide / 2, middle_y + HEIGHT / 2)


def _cost(box: Box, taken: Sequence[Box], inside: Box) -> float:
    return sum(map(box.overlap, taken)) + 4 * (box.area - box.overlap(inside))


def variants_plot(measured: Sequence[Measured], load: Load, teacher: Teacher | None) -> Html:
    """Latency across, mean retention or else mean score up, size as area; empty where nothing was scored."""
    values, words = heights(measured, teacher)
    shown = [(one, value) for one, value in zip(measured, values, strict=True) if value is not None]
    if not shown:
        return Html()
    frame = _frame(shown, 2.0 if "%" in words else 0.02)
    largest = max(one.bytes for one, _ in shown)
    dots = [
        Dot(
            frame.across(math.log10(1e3 * one.timings[0].median)),
            frame.up(value),
            max(SMALLEST, LARGEST * math.sqrt(one.bytes / largest)),
            one.variant.name,
        )
        for one, value in shown
    ]
    inside = Box(frame.left, frame.top - 8, frame.edge, frame.floor)
    boxes = position_labels(dots, inside)
    families = list(dict.fromkeys(_family(one) for one, _ in shown))
    colours = [f"class{families.index(_family(one)) % COLOURS}" for one, _ in shown]
    # Large ones first, so that none hides another.
    order = sorted(range(len(dots)), key=lambda number: -dots[number].radius)
    threads = load.threads[0]
    axis = f"milliseconds for {load.batch} x {load.length} tokens, {threads} {'thread' if threads == 1 else 'threads'}"
    return svg(
        frame,
        "Size, latency and accuracy",
        "; ".join(_describe(one, value, words) for one, value in shown),
        y_axis(frame, target=5),
        _log_axis(frame, axis),
        tag("text", f"{words}; the area of a dot is the size", class_="name", x=frame.left, y=frame.top - 14),
        *(_drawn(dots[n], colours[n], _describe(*shown[n], words)) for n in order),
        *(_label(dot, box) for dot, box in zip(dots, boxes, strict=True)),
    )


def heights(measured: Sequence[Measured], teacher: Teacher | None) -> tuple[list[float | None], str]:
    """Each one's mean retention in percent where all have one, otherwise its mean score; and what that is called."""
    if teacher is not None:
        retained = [mean(retentions(one, teacher)) for one in measured]
        if all(value is not None for value in retained):
            return [
                None if value is None else 100 * value for value in retained
            ], f"mean retention, % of {teacher.name}"
    return [mean(one.main_scores) for one in measured], "mean score"


def _frame(shown: Sequence[tuple[Measured, float]], smallest_span: float) -> Frame:
    exponents = [math.log10(1e3 * one.timings[0].median) for one, _ in shown]
    low, high = padded((value for _, value in shown), smallest_span)
    air = 0.1 * (high - low)
    left, right = min(exponents), max(exponents)
    # Space for half a name on both sides.
    side = max(0.14 * (right - left), 0.15)
    return Frame((left - side, right + side), (low - air, high + air), 720, 400, 44, 24, 34, 38)


def _family(one: Measured) -> str:
    """Variants of one run have one colour."""
    return one.variant.name.partition("/")[0]


def _describe(one: Measured, value: float, words: str) -> str:
    height = f"{value:.1f}" if "%" in words else score(value)
    return f"{one.variant.name}: {1e3 * one.timings[0].median:.3g} ms, {size(one.bytes)}, {words} {height}"


def _drawn(dot: Dot, colour: str, words: str) -> Html:
    circle = tag("circle", tag("title", words), class_="variant", cx=dot.x, cy=dot.y, r=dot.radius)
    return tag("g", circle, class_=colour)


def _label(dot: Dot, box: Box) -> Html:
    text = tag("text", dot.name, class_="x label", x=(box.left + box.right) / 2, y=box.bottom - 3)
    # From the dot to the nearest point of the name, where that is not just beside it.
    x, y = min(max(dot.x, box.left), box.right), min(max(dot.y, box.top), box.bottom)
    distance = math.hypot(x - dot.x, y - dot.y)
    if distance < dot.radius + 9:
        return text
    share = dot.radius / distance
    start = (dot.x + share * (x - dot.x), dot.y + share * (y - dot.y))
    return join((tag("line", class_="leader", x1=start[0], y1=start[1], x2=x, y2=y), text))


def _log_axis(frame: Frame, words: str) -> Html:
    """Draw an axis with steps of 1, 2 and 5, or even ones where few of these lie in the range, as many as fit."""
    shown = log_marks(frame)
    marks = (tag("text", f"{at:.4g}", class_="x", x=frame.across(math.log10(at)), y=frame.floor + 14) for at in shown)
    name = tag("text", words, class_="x name", x=(frame.left + frame.edge) / 2, y=frame.height - 5)
    floor = tag("line", class_="axis", x1=frame.left, x2=frame.edge, y1=frame.floor, y2=frame.floor)
    return join((floor, *marks, name))


def log_marks(frame: Frame) -> list[float]:
    """The values at which a logarithmic x axis has a mark: at least two, wherever its range lies."""
    low, high = frame.x
    powers = range(math.floor(low), math.ceil(high) + 1)
    found = _fitting(frame, [factor * 10.0**power for power in powers for factor in (1, 2, 5)])
    target = 3
    # Variants that are about as fast span less than a factor of two.
    while len(found) < FEWEST_MARKS and target < 24:
        step = tick_step(10.0**high - 10.0**low, target)
        found = _fitting(frame, ticks(10.0**low, 10.0**high, step))
        target *= 2
    return found


def _fitting(frame: Frame, values: Sequence[float]) -> list[float]:
    """Those values that lie in the frame and far enough from each other."""
    low, high = frame.x
    shown: list[float] = []
    for at in (value for value in values if value > 0 and low <= math.log10(value) <= high):
        is_free = not shown or frame.across(math.log10(at)) - frame.across(math.log10(shown[-1])) >= LABEL_GAP
        if is_free:
            shown.append(at)
    return shown
