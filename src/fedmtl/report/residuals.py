"""How far a regression was off: the histogram of its residuals and the errors that follow from them."""

from __future__ import annotations

from .bar_chart import Bar, bar_chart, bar_range
from .formats import count, number, score
from .markup import Html, join, tag
from .record import Event
from .scales import Frame, x_axis

_ERRORS = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}


def residuals(task: str, evaluation: Event) -> Html:
    """The histogram where residuals were recorded, and the errors where they are defined."""
    return join((_histogram(task, evaluation.get("residuals") or {}), _errors(evaluation.get("metrics") or {})))


def _histogram(task: str, found: Event) -> Html:
    edges, counts = found.get("edges") or [], found.get("counts") or []
    if not counts or len(edges) != len(counts) + 1:
        return tag("p", "No residuals were recorded.", class_="guide")
    bars = [
        Bar(left, right, ((float(many), "up"),), f"{score(left)} to {score(right)}: {count(many)}")
        for left, right, many in zip(edges, edges[1:], counts, strict=False)
    ]
    frame = Frame(x=(edges[0], edges[-1]), y=bar_range(bars), height=170)
    words = f"{count(sum(counts))} residuals from {score(edges[0])} to {score(edges[-1])}."
    parts = [x_axis(frame, "residual", whole=False)]
    if edges[0] < 0 < edges[-1]:
        zero = frame.across(0)
        parts.append(tag("line", class_="mark", x1=zero, x2=zero, y1=frame.top - 6, y2=frame.floor))
    return bar_chart(frame, bars, title=f"{task}: residuals", description=words, axis=join(parts))


def _errors(metrics: Event) -> Html:
    pairs = (
        tag("div", tag("dt", words), tag("dd", score(number(metrics[name]))))
        for name, words in _ERRORS.items()
        if name in metrics
    )
    return tag("dl", *pairs, class_="facts errors")
