"""The sharing plan: who shares which layer, and the rules that say so."""

from __future__ import annotations

from collections.abc import Sequence

from .adaptive import layer_moves
from .contents import section
from .formats import count, number, percent
from .levels import LEVELS, chip, level_class
from .markup import Html, join, table, tag
from .record import Event, Run


def sharing(run: Run) -> Html:
    if not run.plans:
        return section("sharing", tag("p", "The run recorded no sharing plan."))
    plan = run.plans[-1]
    parts: list[Html] = []
    if len(run.plans) > 1:
        words = f"The plan changed during the run; this is the last of {len(run.plans)}."
        parts.append(tag("p", words, class_="guide"))
    parts += [_key(plan), _stack(plan), layer_moves(run), _scopes(plan), _rules(plan)]
    return section("sharing", *parts)


def _key(plan: Event) -> Html:
    used = {str(part.get("level")).split(".")[0] for part in (*plan.get("layers", ()), *plan.get("scopes", ()))}
    items = (tag("li", chip(level), " ", words) for level, words in LEVELS.items() if level in used)
    return tag("ul", *items, class_="legend levels")


def _stack(plan: Event) -> Html:
    """The layers as they lie on each other: the text enters below, the answers leave on top."""
    layers = list(reversed(plan.get("layers") or []))
    total = _sum(layers)
    rows = [
        (
            tag("span", layer.get("layer"), class_=f"slab {level_class(layer.get('level'))}"),
            chip(layer.get("level")),
            count(layer.get("parameters")),
            _portion(layer, total),
        )
        for layer in layers
    ]
    total_words = count(plan.get("total") or total)
    trained = plan.get("trainable")
    some = "" if trained in (None, plan.get("total")) else f", {count(trained)} of them trained"
    caption = f"Layers, the input at the bottom; {total_words} parameters{some}"
    head = ("Layer", "Shared by", "Parameters", "Portion")
    return table(caption, head, rows, words={1, 3}, class_="stack", tall=len(rows) > 40)


def _scopes(plan: Event) -> Html:
    scopes = plan.get("scopes") or []
    rows = [
        (
            tag("code", scope.get("scope")),
            chip(scope.get("level")),
            count(scope.get("parameters")),
            count(scope.get("tensors")),
            _portion(scope, _sum(scopes)),
        )
        for scope in scopes
    ]
    caption = f"Scopes: who holds one value together; {count(_sum(scopes))} parameters in all of them"
    head = ("Scope", "Level", "Parameters", "Tensors", "Portion")
    return table(caption, head, rows, words={1, 4}, tall=len(rows) > 24)


def _rules(plan: Event) -> Html:
    rows = [(tag("code", pattern), chip(level)) for pattern, level in plan.get("rules") or ()]
    rules = table("Rules, the first match wins", ("Parameters named", "Level"), rows, words={1})
    groups = plan.get("groups") or {}
    if not groups:
        return rules
    return join((rules, tag("p", f"Groups of tasks: {_members(groups)}.", class_="guide")))


def _members(members: object) -> str:
    """A group's tasks, or its groups with theirs in brackets."""
    if isinstance(members, dict):
        return ", ".join(f"{name} ({_members(inner)})" for name, inner in members.items())
    return ", ".join(map(str, members)) if isinstance(members, Sequence) else str(members)


def _sum(parts: Sequence[Event]) -> float:
    return sum(number(part.get("parameters")) or 0.0 for part in parts)


def _portion(part: Event, total: float) -> Html:
    """A part of its own table: scopes add up to more than the layers where groups hold several values."""
    share = _sum([part]) / total if total else 0.0
    bar = tag("span", class_=f"fill {level_class(part.get('level'))}", style=f"width:{share:.2%}")
    words = tag("span", percent(share), class_="many")
    return tag("span", words, tag("span", bar, class_="track"), class_="portion")
