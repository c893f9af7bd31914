"""Pictures of the study: scores by mode with every seed, scores over rounds, and each client's gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from fedmtl.report.charts import Frame, padded, svg, y_axis
from fedmtl.report.formats import score
from fedmtl.report.markup import Html, tag
from fedmtl.study.federated.cells import BASE, FEDERATED, LONG, MODES, ORIGINAL, at
from fedmtl.study.federated.gains import gains, shared_setups
from fedmtl.study.federated.results import Result
from fedmtl.study.federated.tables import Known
from fedmtl.study.figures import COLOURS, curves

STYLE = """
.seen { fill: var(--c); fill-opacity: .55 } .mean { stroke: var(--c); stroke-width: 2.5 }
.nought { stroke: var(--quiet); stroke-dasharray: 3 3 } svg text.turned { text-anchor: end }
"""
# Names that fit beside a curve and under a column.
SHORT = {"federated-single-task": "fed. single", "centralized-single-task": "centr. single"}
Pictures = dict[str, tuple[str, Html]]


def make_figures(known: Known) -> Pictures:
    """By file name a title and a picture, as far as cells are finished."""
    pictures: Pictures = {}
    for task, metric in known.metrics.items():
        pictures |= _of(
            "modes", f"{task} {metric} by mode, all samples, iid; a dot is a seed", task, _modes(task, known)
        )
        pictures |= _rounds(task, metric, known)
        found = _client_gains(task, known)
        pictures |= _of("gains", f"{task}: points above local; a dot is a client", task, found, has_zero=True)
    return pictures


def _of(
    kind: str, title: str, task: str, columns: Mapping[str, Sequence[float]], *, has_zero: bool = False
) -> Pictures:
    return {f"{kind}-{task}": (title, dots(title, columns, has_zero=has_zero))} if columns else {}


def dots(title: str, columns: Mapping[str, Sequence[float]], *, has_zero: bool = False) -> Html:
    """A column of dots for each name, a bar at their mean."""
    values = [value for own in columns.values() for value in own]
    span = padded([*values, 0.0], 2.0) if has_zero else padded(values, 0.02)
    wide = max(420.0, 46.0 * len(columns) + 60)
    frame = Frame((0, len(columns)), span, width=wide, height=300, left=76, bottom=100)
    drawn = [_column(frame, n, name, own) for n, (name, own) in enumerate(columns.items())]
    zero = tag("line", class_="nought", x1=frame.left, x2=frame.edge, y1=frame.up(0), y2=frame.up(0))
    words = "; ".join(f"{name}: mean {_words(mean(own), has_zero)}" for name, own in columns.items())
    return svg(frame, title, words, y_axis(frame, target=5), zero if has_zero else "", *drawn)


def _words(value: float, is_points: bool) -> str:
    return f"{value:.2f} points" if is_points else score(value)


def _column(frame: Frame, n: int, name: str, own: Sequence[float]) -> Html:
    x, middle, beside = frame.across(n + 0.5), frame.up(mean(own)), min(5, len(own))
    spots = [
        # Beside each other, so that equal ones are seen.
        tag("circle", class_="seen", cx=x + 5 * (number % beside - (beside - 1) / 2), cy=frame.up(value), r=3.2)
        for number, value in enumerate(own)
    ]
    bar = tag("line", class_="mean", x1=x - 14, x2=x + 14, y1=middle, y2=middle)
    low = frame.floor + 12
    label = tag("text", name, class_="turned", x=x, y=low, transform=f"rotate(-40 {x:.1f} {low:.1f})")
    return tag("g", *spots, bar, label, class_=f"class{n % COLOURS}")


def short(kind: str) -> str:
    return SHORT.get(kind, kind.removeprefix("federated-"))


def _finished(known: Known, setup: str) -> list[Result]:
    return [one for one in known.results.get(setup, {}).values() if one is not None]


def _modes(task: str, known: Known) -> dict[str, list[float]]:
    scores = {
        short(setup.kind): [value for one in _finished(known, setup.name) if (value := one.score(task)) is not None]
        for setup in at(known.setups, BASE)
        if setup.kind in MODES
    }
    return {kind: own for kind, own in scores.items() if own}


def _rounds(task: str, metric: str, known: Known) -> Pictures:
    """Means over finished seeds by round, from round 1: before it a head is as it was made."""
    pictures: Pictures = {}
    for point in (BASE, LONG, ORIGINAL):
        shown = [setup for setup in at(known.setups, point) if setup.kind in MODES or point == LONG]
        lines = {short(setup.kind): _curve(_finished(known, setup.name), task) for setup in shown}
        title = f"{task} {metric} over rounds, {point}"
        picture = curves(title, lines, "round")
        if picture:
            pictures[f"rounds-{point}-{task}"] = (title, picture)
    return pictures


def _curve(cells: Sequence[Result], task: str) -> dict[int, float]:
    curves_ = [cell.curves.get(task, {}) for cell in cells]
    rounds = sorted({number for curve in curves_ for number in curve if number})
    found: dict[int, float] = {}
    for number in rounds:
        values = [curve.get(number) for curve in curves_]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[number] = mean(known)
    return found


def _client_gains(task: str, known: Known) -> dict[str, list[float]]:
    rows = [setup for setup in shared_setups(known) if setup.kind == FEDERATED]
    found = {
        setup.point.name: [gain.points for gain in gains(known, setup) if gain.task == task and gain.points is not None]
        for setup in rows
    }
    return {name: own for name, own in found.items() if own}
