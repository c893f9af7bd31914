"""Pictures of a study that stand alone as SVG files: curves, confusion matrices, residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedmtl_studies.library import (
    Bar,
    Frame,
    Html,
    bar_chart,
    bar_range,
    count,
    join,
    padded,
    score,
    svg,
    tag,
    write_svg_file,
    x_axis,
    y_axis,
)

COLOURS = 7
FIGURE_STYLE = """
.curve { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round }
svg text.named { fill: color-mix(in oklab, var(--c) 60%, var(--ink)); font-weight: 600 }
svg text.inside { text-anchor: middle; fill: var(--ink) }
svg text.small { font-size: 9px }
.spot { fill: var(--c); fill-opacity: .8 }
"""
_LABEL_GAP = 12.0

Series = Mapping[int, float]
# By file name, a title and a picture.
Figures = dict[str, tuple[str, Html]]


def colour(number: int) -> str:
    """Return the class of the page's style that has the colour of this number."""
    return f"class{number % COLOURS}"


def curves(title: str, lines: Mapping[str, Series], axis: str) -> Html:
    """Draw lines over whole numbers, each named at its end in its colour."""
    known = {name: series for name, series in lines.items() if series}
    if not known:
        return Html()
    ends_at = [at for series in known.values() for at in series]
    values = [value for series in known.values() for value in series.values()]
    low, high = min(ends_at), max(ends_at)
    frame = Frame((low, high if high > low else low + 1), padded(values, 0.02), width=420, height=230, right=110)
    drawn = [line(frame, series, colour(n)) for n, series in enumerate(known.values())]
    ends = [(frame.up(list(series.values())[-1]), colour(n), name) for n, (name, series) in enumerate(known.items())]
    words = "; ".join(f"{name} ends at {score(list(series.values())[-1])}" for name, series in known.items())
    return svg(frame, title, words, y_axis(frame, target=5), x_axis(frame, axis), *drawn, end_names(frame, ends))


def line(frame: Frame, series: Mapping[float, float] | Series, look: str) -> Html:
    """Draw one line through its points, in the colour of a class of the page's style."""
    points = " ".join(f"{frame.across(at):.1f},{frame.up(value):.1f}" for at, value in series.items())
    return tag("g", tag("polyline", class_="curve", points=points), class_=look)


def end_names(frame: Frame, ends: Sequence[tuple[float, str, str]]) -> Html:
    """Write names beside where lines end, each (height, colour, name), pushed apart where they would touch."""
    placed: list[tuple[float, str, str]] = []
    for y, look, name in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, placed[-1][0] + _LABEL_GAP) if placed else y, look, name))
    excess = max(0.0, placed[-1][0] - frame.floor) if placed else 0.0
    return join(
        tag("text", name, class_=f"named {look}", x=frame.edge + 7, y=y - excess + 3.5) for y, look, name in placed
    )


def confusion(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Html:
    """Draw a matrix whose rows are the true labels, columns the predicted ones; darker is a larger share of the row."""
    side = len(counts)
    frame = Frame((0, side), (0, side), width=340, height=300, left=96, right=6, top=6, bottom=44)
    wide, high = (frame.edge - frame.left) / side, (frame.floor - frame.top) / side
    cells = [
        _cell(frame.left + column * wide, frame.top + row * high, wide, high, many, sum(answers), row == column)
        for row, answers in enumerate(counts)
        for column, many in enumerate(answers)
    ]
    across = (
        tag("text", _short(label), class_="x small", x=frame.left + (at + 0.5) * wide, y=frame.floor + 12)
        for at, label in enumerate(labels)
    )
    down = (
        tag("text", label, class_="y", x=frame.left - 6, y=frame.top + (at + 0.5) * high + 4)
        for at, label in enumerate(labels)
    )
    name = tag("text", "predicted", class_="x name", x=(frame.left + frame.edge) / 2, y=frame.height - 6)
    words = "Rows are true labels, columns predicted ones."
    return svg(frame, title, words, *cells, *across, *down, name)


def _short(label: str) -> str:
    return label.replace("very ", "v. ").replace("negative", "neg.").replace("positive", "pos.")[:14]


def _cell(x: float, y: float, wide: float, high: float, many: int, total: int, is_right: bool) -> Html:
    share = many / total if total else 0.0
    look = "right" if is_right else "wrong"
    box = {"x": x, "y": y, "width": wide - 1, "height": high - 1}
    middle = x + wide / 2
    return join(
        (
            tag("rect", class_=look, fill_opacity=f"{0.08 + 0.5 * share:.2f}", **box),
            tag("text", count(many), class_="inside", x=middle, y=y + high / 2),
            tag("text", score(share), class_="inside small", x=middle, y=y + high / 2 + 12),
        )
    )


def residuals(title: str, edges: Sequence[float], counts: Sequence[int]) -> Html:
    """Draw how far predictions were off, prediction minus score, as a histogram."""
    bars = [
        Bar(left, right, ((float(many), "up"),), f"{score(left)} to {score(right)}: {count(many)}")
        for left, right, many in zip(edges, edges[1:], counts, strict=False)
    ]
    frame = Frame((edges[0], edges[-1]), bar_range(bars), width=340, height=230)
    zero = frame.across(0)
    mark = tag("line", class_="mark", x1=zero, x2=zero, y1=frame.top - 6, y2=frame.floor)
    axis = join((x_axis(frame, "residual", whole=False), mark))
    return bar_chart(frame, bars, title=title, description=f"{count(sum(counts))} residuals.", axis=axis)


def write_svg(path: Path, picture: Html, style: str = "") -> None:
    """Write a picture as a file that needs nothing else, in the look of all figures and of `style`."""
    write_svg_file(path, picture, FIGURE_STYLE + style)


def dots(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    axis: str,
    x: tuple[float, float] = (0, 1),
    level: float | None = None,
) -> Html:
    """Draw a line for every row with a dot for each of its series, whose names stand above in their colours.

    `level` is a value to compare with, drawn dashed.
    """
    series = list(dict.fromkeys(name for values in rows.values() for name in values))
    if not series:
        return Html()
    width, left, gap = 460.0, 150.0, 20.0
    names = _names_above(series, left, width - 12)
    top = 14.0 + 13 * (1 + max(line for line, _ in names.values()))
    frame = Frame(x, (0, 1), width=width, height=top + gap * len(rows) + 36, left=left, top=top)
    parts = [
        tag("text", name, class_=f"named {colour(series.index(name))}", x=at, y=12 + 13 * line)
        for name, (line, at) in names.items()
    ]
    if level is not None:
        at = frame.across(level)
        parts.append(tag("line", class_="mark", x1=at, x2=at, y1=frame.top, y2=frame.floor))
    for number, (row, values) in enumerate(rows.items()):
        y = frame.top + gap * (number + 0.5)
        parts.append(tag("line", class_="grid", x1=frame.left, x2=frame.edge, y1=y, y2=y))
        parts.append(tag("text", row, class_="y", x=frame.left - 8, y=y + 3.5))
        for name, value in values.items():
            at = frame.across(min(max(value, x[0]), x[1]))
            words = tag("title", f"{row}, {name}: {score(value)}")
            parts.append(tag("circle", words, class_=f"spot {colour(series.index(name))}", cx=at, cy=y, r=4.2))
    spoken = "; ".join(
        f"{row}: " + ", ".join(f"{name} {score(v)}" for name, v in values.items()) for row, values in rows.items()
    )
    return svg(frame, title, spoken, x_axis(frame, axis, whole=False), *parts)


def _names_above(names: Sequence[str], left: float, right: float) -> dict[str, tuple[int, float]]:
    """Return the line and the place of each name, as many on a line as fit."""
    placed: dict[str, tuple[int, float]] = {}
    line, at = 0, left
    for name in names:
        wide = 6.2 * len(name) + 14
        if at + wide > right and at > left:
            line, at = line + 1, left
        placed[name] = (line, at)
        at += wide
    return placed
