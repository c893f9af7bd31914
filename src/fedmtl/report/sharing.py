"""The sharing plan says who shares which layer.

Where the server moved layers or weighted tasks by itself, this shows when and why.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmtl.report.charts import Frame, Line, line_chart, padded
from fedmtl.report.formats import count, percent, score
from fedmtl.report.markup import Html, join, notes, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run
from fedmtl.runs.events import AggregationEvent, LayerFacts, LayerMove, PlanEvent, ScopeFacts

LEVELS = {
    "all": "one value for every client",
    "group": "one value for each group of tasks",
    "task": "one value for each task",
    "client": "stays at its client",
    "fixed": "the same everywhere, never moves",
}
MOST_COLUMNS = 40
SMALLEST_WEIGHT_SPAN = 0.2
_RIGHT = 84.0


def level_class(level: object) -> str:
    """The CSS class of a level; `group.2` is drawn as `group`."""
    word = str(level).split(".")[0]
    return f"level-{word}" if word in LEVELS else "level-fixed"


def chip(level: object) -> Html:
    return tag("span", level, class_=f"chip {level_class(level)}")


def layer_moves(run: Run) -> Html:
    """A table of layers and rounds: the lowest agreement of two tasks, and where a layer moved."""
    if not run.decisions:
        return Html()
    by_layer = _by_layer(run)
    shown = _shown(run)
    rows = []
    for layer, decided in reversed(by_layer.items()):
        last = decided[max(decided)]
        rows.append((layer, *(_cell(decided.get(at)) for at in shown), chip(last.after)))
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
    tasks = list(dict.fromkeys(task for event in run.weights.values() for task in event.weights))
    lines = [Line(task, {at: event.weights.get(task) for at, event in run.weights.items()}) for task in tasks]
    known = [value for line in lines for value in line.scores.values() if value is not None]
    y = padded(known, SMALLEST_WEIGHT_SPAN)
    frame = Frame(x=(0, max(run.last_round, 1)), y=y, height=200, right=_RIGHT)
    ends = ", ".join(f"{task} {score(line.scores[max(line.scores)])}" for task, line in zip(tasks, lines, strict=True))
    caption = tag("figcaption", tag("b", "Task weights"), "how much each task counted in a round")
    words = f"At the end: {ends}."
    return tag(
        "figure", caption, line_chart(frame, lines, title="Task weights by round", description=words, axis="round")
    )


def _by_layer(run: Run) -> dict[str, dict[int, LayerMove]]:
    """layer -> round -> what was decided of it, layers in model order."""
    layers: dict[str, dict[int, LayerMove]] = {}
    for at, event in sorted(run.decisions.items()):
        for decided in event.layers:
            layers.setdefault(decided.layer, {})[at] = decided
    return layers


def _moved(decided: LayerMove) -> bool:
    return decided.before != decided.after


def _shown(run: Run) -> list[int]:
    """All rounds if they fit the columns; else those with a move, and some of the others at equal distances."""
    rounds = sorted(run.decisions)
    apart = -(-len(rounds) // MOST_COLUMNS)
    return [
        at
        for index, at in enumerate(rounds)
        if index % apart == 0 or at == rounds[-1] or any(map(_moved, run.decisions[at].layers))
    ]


def _cell(decided: LayerMove | None) -> Html:
    if decided is None:
        return Html()
    agreement = decided.agreement or decided.measured
    known = [value for value in agreement.values() if value is not None]
    lowest = min(known, default=None)
    arrow = tag("small", f"→ {decided.after}") if _moved(decided) else Html()
    words = "; ".join([*(f"{pair} {score(value)}" for pair, value in agreement.items()), decided.reason])
    look = "cell right" if lowest is None or lowest >= 0 else "cell wrong"
    share = f"--share:{min(1.0, 2 * abs(lowest or 0.0)) * 60:.0f}%"
    return tag("div", score(lowest), arrow, class_=look, style=share, title=words)


def _words(by_layer: dict[str, dict[int, LayerMove]]) -> list[str]:
    moves = [
        (at, f"Round {at}: {layer} went from {move.before} to {move.after}; {move.reason}.")
        for layer, decided in by_layer.items()
        for at, move in decided.items()
        if _moved(move)
    ]
    return [words for _, words in sorted(moves)] or ["No layer moved."]


def sharing(run: Run) -> Html:
    if not run.plans:
        return section("sharing", tag("p", "The run recorded no sharing plan."))
    plan = run.plans[-1]
    parts: list[Html] = []
    if len(run.plans) > 1:
        words = f"The plan changed during the run; this is the last of {len(run.plans)}."
        parts.append(tag("p", words, class_="guide"))
    parts += [_key(plan), _stack(plan), layer_moves(run), _scopes(plan), _aggregation(run.aggregation), _rules(plan)]
    return section("sharing", *parts)


def _key(plan: PlanEvent) -> Html:
    levels = [layer.level for layer in plan.layers] + [scope.level for scope in plan.scopes]
    used = {level.split(".")[0] for level in levels}
    items = (tag("li", chip(level), " ", words) for level, words in LEVELS.items() if level in used)
    return tag("ul", *items, class_="legend levels")


def _stack(plan: PlanEvent) -> Html:
    """The layers as they lie on each other: the text enters below, the answers leave on top."""
    layers = plan.layers[::-1]
    total = _sum(layers)
    rows = [
        (
            tag("span", layer.layer, class_=f"slab {level_class(layer.level)}"),
            chip(layer.level),
            count(layer.parameters),
            _portion(layer, total),
        )
        for layer in layers
    ]
    total_words = count(plan.total or total)
    some = "" if plan.trainable in (None, plan.total) else f", {count(plan.trainable)} of them trained"
    caption = f"Layers, the input at the bottom; {total_words} parameters{some}"
    head = ("Layer", "Shared by", "Parameters", "Portion")
    return table(caption, head, rows, words={1, 3}, class_="stack", tall=len(rows) > 40)


def _scopes(plan: PlanEvent) -> Html:
    total = _sum(plan.scopes)
    rows = [
        (
            tag("code", scope.scope),
            chip(scope.level),
            count(scope.parameters),
            count(scope.tensors),
            _portion(scope, total),
        )
        for scope in plan.scopes
    ]
    caption = f"Scopes: who holds one value together; {count(total)} parameters in all of them"
    head = ("Scope", "Level", "Parameters", "Tensors", "Portion")
    return table(caption, head, rows, words={1, 4}, tall=len(rows) > 24)


def _aggregation(event: AggregationEvent | None) -> Html:
    """Which rule combines each scope, and where none can help; nothing where all are averaged plainly."""
    if event is None:
        return Html()
    rows = [(tag("code", scope), found.rule, count(found.clients)) for scope, found in event.scopes.items()]
    rules = table("Aggregation rules at the start", ("Scope", "Rule", "Clients"), rows, words={1}, tall=len(rows) > 24)
    words = event.warning()
    return join((rules, notes([f"{words[0].upper()}{words[1:]}."]) if words else Html()))


def _rules(plan: PlanEvent) -> Html:
    rows = [(tag("code", pattern), chip(level)) for pattern, level in plan.rules]
    rules = table("Rules, the first match wins", ("Parameters named", "Level"), rows, words={1})
    if not plan.groups:
        return rules
    return join((rules, tag("p", f"Groups of tasks: {_members(plan.groups)}.", class_="guide")))


def _members(members: object) -> str:
    """A group's tasks, or its groups with theirs in brackets."""
    if isinstance(members, dict):
        return ", ".join(f"{name} ({_members(inner)})" for name, inner in members.items())
    return ", ".join(map(str, members)) if isinstance(members, Sequence) else str(members)


def _sum(parts: Sequence[LayerFacts | ScopeFacts]) -> int:
    return sum(part.parameters for part in parts)


def _portion(part: LayerFacts | ScopeFacts, total: int) -> Html:
    """A bar of a part's share of its table; scopes add up to more than the layers where groups have several values."""
    share = part.parameters / total if total else 0.0
    bar = tag("span", class_=f"fill {level_class(part.level)}", style=f"width:{share:.2%}")
    words = tag("span", percent(share), class_="many")
    return tag("span", words, tag("span", bar, class_="track"), class_="portion")
