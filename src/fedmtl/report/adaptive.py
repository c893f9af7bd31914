"""What the server changed by itself: which layers moved and why, and how much each task counted."""

from __future__ import annotations

from .formats import number, score
from .levels import chip
from .line_chart import Line, line_chart
from .markup import Html, join, notes, table, tag
from .record import Event, Run
from .scales import Frame, padded

MOST_COLUMNS = 40
SMALLEST_WEIGHT_SPAN = 0.2
_RIGHT = 84.0


def layer_moves(run: Run) -> Html:
    """A table of layers and rounds: the lowest agreement of two tasks, and where a layer moved."""
    if not run.decisions:
        return Html()
    by_layer = _by_layer(run)
    shown = _shown(run)
    rows = []
    for layer, decided in reversed(by_layer.items()):
        last = decided[max(decided)]
        rows.append((layer, *(_cell(decided.get(at)) for at in shown), chip(last["after"])))
    caption = "Agreement of the tasks in each movable layer, by round; the input at the bottom"
    guide = (
        "Each cell is the lowest smoothed cosine between the updates of two tasks. Where tasks disagree a layer "
        "splits, where they agree it merges again; an arrow is a move. Hold the pointer over a cell for all pairs."
    )
    head = ("Layer", *map(str, shown), "now")
    moves = table(caption, head, rows, words={len(shown) + 1}, class_="matrix")
    return join((tag("p", guide, class_="guide"), moves, notes(_words(by_layer))))


def task_weights(run: Run) -> Html:
    """A panel with how much each task counted in each round; nothing where the weights were fixed."""
    if not run.weights:
        return Html()
    tasks = list(dict.fromkeys(task for event in run.weights.values() for task in event["weights"]))
    lines = [Line(task, {at: number(e["weights"].get(task)) for at, e in run.weights.items()}) for task in tasks]
    known = [value for line in lines for value in line.scores.values() if value is not None]
    y = padded(known, SMALLEST_WEIGHT_SPAN)
    frame = Frame(x=(0, max(run.last_round, 1)), y=y, height=200, right=_RIGHT)
    ends = ", ".join(f"{task} {score(line.scores[max(line.scores)])}" for task, line in zip(tasks, lines, strict=True))
    caption = tag("figcaption", tag("b", "Task weights"), "how much each task counted in a round")
    words = f"At the end: {ends}."
    return tag(
        "figure", caption, line_chart(frame, lines, title="Task weights by round", description=words, axis="round")
    )


def _by_layer(run: Run) -> dict[str, dict[int, Event]]:
    """layer -> round -> what was decided of it, layers in model order."""
    layers: dict[str, dict[int, Event]] = {}
    for at, event in sorted(run.decisions.items()):
        for decided in event["layers"]:
            layers.setdefault(decided["layer"], {})[at] = decided
    return layers


def _moved(decided: Event) -> bool:
    return bool(decided["before"] != decided["after"])


def _shown(run: Run) -> list[int]:
    """All rounds where there is room; else those with a move, and some of the others at equal distances."""
    rounds = sorted(run.decisions)
    apart = -(-len(rounds) // MOST_COLUMNS)
    return [
        at
        for place, at in enumerate(rounds)
        if place % apart == 0 or at == rounds[-1] or any(map(_moved, run.decisions[at]["layers"]))
    ]


def _cell(decided: Event | None) -> Html:
    if decided is None:
        return Html()
    agreement = {pair: number(value) for pair, value in (decided["agreement"] or decided["measured"]).items()}
    known = [value for value in agreement.values() if value is not None]
    lowest = min(known, default=None)
    arrow = tag("small", f"→ {decided['after']}") if _moved(decided) else Html()
    words = "; ".join([*(f"{pair} {score(value)}" for pair, value in agreement.items()), decided["reason"]])
    look = "cell right" if lowest is None or lowest >= 0 else "cell wrong"
    share = f"--share:{min(1.0, abs(lowest or 0.0)) * 70:.0f}%"
    return tag("div", score(lowest), arrow, class_=look, style=share, title=words)


def _words(by_layer: dict[str, dict[int, Event]]) -> list[str]:
    moves = [
        (at, f"Round {at}: {layer} went from {own['before']} to {own['after']}; {own['reason']}.")
        for layer, decided in by_layer.items()
        for at, own in decided.items()
        if _moved(own)
    ]
    return [words for _, words in sorted(moves)] or ["No layer moved."]
