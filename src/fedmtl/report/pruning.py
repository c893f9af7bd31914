"""How sparse the model became: a panel beside the curves."""

from __future__ import annotations

from .formats import percent
from .line_chart import Line, line_chart
from .markup import Html, tag
from .record import Event, Run
from .scales import Frame, padded

SMALLEST_SPAN = 0.05
_RIGHT = 62.0


def sparsity(run: Run) -> Html:
    """The share of zeros by round, in linear layers and in all weights; nothing where none were pruned."""
    if not run.pruned:
        return Html()
    lines = [
        Line(part, {at: _share(event[part]) for at, event in sorted(run.pruned.items())}, light=part == "all")
        for part in ("all", "linear")
    ]
    last = run.pruned[max(run.pruned)]
    ends = f"{percent(_share(last['linear']))} of the linear layers, {percent(_share(last['all']))} of all weights"
    known = [value for line in lines for value in line.scores.values() if value is not None]
    frame = Frame(x=(0, max(run.last_round, 1)), y=padded(known, SMALLEST_SPAN), height=200, right=_RIGHT)
    caption = tag("figcaption", tag("b", "Sparsity"), f"zero: {ends}")
    words = f"At the end: {ends}."
    return tag(
        "figure", caption, line_chart(frame, lines, title="Share of zeros by round", description=words, axis="round")
    )


def _share(counts: Event) -> float:
    return float(counts["zeros"] / counts["weights"]) if counts["weights"] else 0.0
