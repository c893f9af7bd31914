"""The paper's three figures, a panel for each task (and encoder), with chance as a dashed line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from fedmtl_studies.figures import Figures, colour, end_names, line
from fedmtl_studies.library import Frame, Html, join, padded, score, svg, tag, x_axis, y_axis
from fedmtl_studies.page import Value, words
from fedmtl_studies.scaling_results import TARGET, Known, Setup, encoder_label, reached_value

STYLE = """
.spot { fill: var(--c) } .seed { fill: var(--c); opacity: .45 }
.lost { stroke: var(--c); stroke-width: 1.8; fill: none }
.level { stroke: var(--quiet); stroke-dasharray: 5 4; stroke-width: 1.2 }
svg text.level-name { fill: var(--quiet); font-size: 9px; stroke: none }
"""
SIZE = {"width": 460.0, "height": 240.0, "right": 152.0}
# Failures lie on a line above all rounds.
ABOVE, AIR = 1.08, 1.16


@dataclass(frozen=True)
class _Panel:
    """What all figures of one task have: its encoders in their colours and the numbers of clients, evenly apart."""

    known: Known
    task: str
    encoders: tuple[str, ...]
    clients: tuple[int, ...]

    def setups(self, encoder: str) -> list[tuple[int, Setup]]:
        return [(at, Setup(encoder, self.task, clients)) for at, clients in enumerate(self.clients)]

    def frame(self, y: tuple[float, float]) -> Frame:
        return Frame((-0.25, len(self.clients) - 0.75), y, **SIZE)

    def axis(self, frame: Frame) -> Html:
        """Draw the numbers of clients at equal distances, as each is about twice the one before."""
        marks = (
            tag("text", clients, class_="x", x=frame.across(at), y=frame.floor + 13)
            for at, clients in enumerate(self.clients)
        )
        name = tag("text", "clients", class_="x name", x=(frame.left + frame.edge) / 2, y=frame.height - 3)
        floor = tag("line", class_="axis", x1=frame.left, x2=frame.edge, y1=frame.floor, y2=frame.floor)
        return join((floor, *marks, name))


def make_figures(known: Known) -> Figures:
    """Return the figures, as far as cells are finished."""
    drawn: Figures = {}
    encoders = tuple(encoder_label(encoder) for encoder in known.options.encoders)
    panels = [_Panel(known, task, encoders, tuple(sorted(known.options.clients))) for task in known.options.tasks]
    for panel in panels:
        rounds = known.options.rounds[panel.task]
        title = f"Figure 1: accuracy after {rounds} rounds, {panel.task}"
        _put(drawn, f"figure1-{panel.task}", title, _accuracies(panel, title))
    for panel in panels:
        title = f"Figure 2: rounds to {TARGET:.0%} of one client's accuracy, {panel.task}"
        _put(drawn, f"figure2-{panel.task}", title, _rounds(panel, title))
    for panel in panels:
        for encoder in encoders:
            title = f"Figure 3: accuracy over rounds, {panel.task}, {encoder}"
            _put(drawn, f"figure3-{panel.task}-{encoder.replace(':', '-')}", title, _dynamics(panel, encoder, title))
    return drawn


def _put(drawn: Figures, name: str, title: str, picture: Html) -> None:
    if picture:
        drawn[name] = (title, picture)


def _chance(frame: Frame, level: float | None) -> Html:
    if level is None:
        return Html()
    y = frame.up(level)
    words_at = tag("text", "chance", class_="level-name", x=frame.left + 4, y=y - 3)
    return join((tag("line", class_="level", x1=frame.left, x2=frame.edge, y1=y, y2=y), words_at))


def _accuracies(panel: _Panel, title: str) -> Html:
    known, at = panel.known, panel.known.options.rounds[panel.task]
    seeds = {
        encoder: {
            position: [cell.curve[at] for cell in known.cells(setup).values() if cell]
            for position, setup in panel.setups(encoder)
        }
        for encoder in panel.encoders
    }
    every = [value for by_position in seeds.values() for values in by_position.values() for value in values]
    if not every:
        return Html()
    chance = known.chance(panel.task)
    frame = panel.frame(padded([*every, *([] if chance is None else [chance])], 0.05))
    drawn, ends, parts = [], [], []
    for n, (encoder, by_position) in enumerate(seeds.items()):
        means = {position: mean(values) for position, values in by_position.items() if values}
        if not means:
            continue
        drawn.append(_spotted(frame, means, by_position, colour(n)))
        last = means[max(means)]
        ends.append((frame.up(last), colour(n), encoder))
        parts.append(f"{encoder} has {score(last)} with {panel.clients[max(means)]} clients")
    return svg(
        frame, title, f"{'; '.join(parts)}; chance is {score(chance)}.", y_axis(frame, target=5), panel.axis(frame),
        _chance(frame, chance), *drawn, end_names(frame, ends),
    )  # fmt: skip


def _spotted(frame: Frame, means: Mapping[int, float], seeds: Mapping[int, Sequence[float]], look: str) -> Html:
    """Draw a line through the means, a small spot for every seed."""
    spots = [
        tag("circle", tag("title", score(value)), class_="spot", cx=frame.across(at), cy=frame.up(value), r=2.8)
        for at, value in means.items()
    ]
    single = [
        tag("circle", class_="seed", cx=frame.across(at), cy=frame.up(value), r=1.6)
        for at, values in seeds.items()
        for value in values
        if len(values) > 1
    ]
    lines = (line(frame, run, look) for run in _unbroken(means))
    return join((*lines, tag("g", *single, *spots, class_=look)))


def _unbroken(means: Mapping[int, float]) -> list[dict[int, float]]:
    """Return neighbours together: no line leads over a number of clients that has no value."""
    runs: list[dict[int, float]] = []
    for at, value in sorted(means.items()):
        if not runs or at - 1 not in runs[-1]:
            runs.append({})
        runs[-1][at] = value
    return runs


def _rounds(panel: _Panel, title: str) -> Html:
    known, most = panel.known, panel.known.options.threshold_rounds[panel.task]
    frame = panel.frame((0.0, most * AIR))
    drawn, ends, parts = [], [], []
    for n, encoder in enumerate(panel.encoders):
        values = {at: reached_value(known.reached(setup), most) for at, setup in panel.setups(encoder)}
        means = {at: value.mean for at, value in values.items() if value is not None and not isinstance(value, str)}
        lost = {at: value for at, value in values.items() if isinstance(value, str) and value != "void"}
        if "void" in values.values():
            ends.append((frame.floor, colour(n), f"{encoder}: void"))
            parts.append(f"{encoder}: void, one client is at chance")
        elif means or lost:
            drawn.append(_spotted(frame, means, {}, colour(n)))
            # Beside each other: several encoders fail with as many clients.
            drawn += [
                _cross(frame, at + 0.1 * n, most * ABOVE, colour(n), encoder, value) for at, value in lost.items()
            ]
            end = most * ABOVE if lost and max(lost) > max(means, default=-1) else means[max(means)]
            ends.append((frame.up(end), colour(n), encoder))
            parts.append(f"{encoder}: {', '.join(_values_in_words(panel, values))}")
    if not ends:
        return Html()
    mark = tag("text", f"not in {most} rounds", class_="level-name", x=frame.left + 4, y=frame.up(most * ABOVE) - 5)
    edge = frame.up(most)
    limit = tag("line", class_="level", x1=frame.left, x2=frame.edge, y1=edge, y2=edge)
    return svg(
        frame, title, f"{'; '.join(parts)}.", y_axis(frame, target=5), panel.axis(frame), limit, mark, *drawn,
        end_names(frame, ends),
    )  # fmt: skip


def _values_in_words(panel: _Panel, values: Mapping[int, Value]) -> list[str]:
    return [f"{words(value, 'number')} with {panel.clients[at]}" for at, value in values.items() if value is not None]


def _cross(frame: Frame, at: float, height: float, look: str, encoder: str, value: str) -> Html:
    x, y = frame.across(at), frame.up(height)
    path = f"M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7"
    return tag("g", tag("title", f"{encoder}: {value}"), tag("path", class_="lost", d=path), class_=look)


def _dynamics(panel: _Panel, encoder: str, title: str) -> Html:
    known, chance = panel.known, panel.known.chance(panel.task)
    lines = {
        setup.clients: found
        for _, setup in panel.setups(encoder)
        if (found := _mean_curve([cell.curve for cell in known.cells(setup).values() if cell]))
    }
    if not lines:
        return Html()
    values = [value for curve in lines.values() for value in curve.values()]
    last = max(at for curve in lines.values() for at in curve)
    frame = Frame((0, max(1, last)), padded([*values, *([] if chance is None else [chance])], 0.05), **SIZE)
    colours = {clients: colour(n) for n, clients in enumerate(panel.clients)}
    ends = [
        (frame.up(curve[max(curve)]), colours[n], f"{n} client{'s' if n > 1 else ''}") for n, curve in lines.items()
    ]
    fixed = frame.across(min(last, known.options.rounds[panel.task]))
    mark = tag("line", class_="mark", x1=fixed, x2=fixed, y1=frame.top, y2=frame.floor)
    ends_at = "; ".join(f"{n} clients end at {score(curve[max(curve)])}" for n, curve in lines.items())
    return svg(
        frame, title, f"{ends_at}; chance is {score(chance)}.", y_axis(frame, target=5), x_axis(frame, "round"), mark,
        _chance(frame, chance), *(line(frame, curve, colours[n]) for n, curve in lines.items()), end_names(frame, ends),
    )  # fmt: skip


def _mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean curve over seeds, of the rounds that all of them have."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {at: mean(curve[at] for curve in curves) for at in sorted(shared)}
