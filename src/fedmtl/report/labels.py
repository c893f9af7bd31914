"""The colours of a task's labels, the same in every picture of the page."""

from __future__ import annotations

from collections.abc import Mapping

from .formats import count, number
from .markup import Html, legend
from .record import Run

MOST_COLOURS = 7


def label_colours(run: Run, task: str) -> dict[str, str]:
    """Label -> CSS class: a hue for a category, a shade for a range of scores, `other` for rare ones."""
    counts = _counts(run, task)
    if run.task(task).get("kind") == "regression":
        last = max(1, len(counts) - 1)
        return {label: f"shade{round(i * 7 / last)}" for i, label in enumerate(counts)}
    if len(counts) <= MOST_COLOURS:
        return {label: f"class{i}" for i, label in enumerate(counts)}
    frequent = sorted(counts, key=lambda label: -counts[label])[: MOST_COLOURS - 1]
    return {label: f"class{frequent.index(label)}" if label in frequent else "other" for label in counts}


def _counts(run: Run, task: str) -> dict[str, float]:
    """Examples per label over all clients, in the task's own order of labels."""
    totals: dict[str, float] = {str(label): 0.0 for label in run.task(task).get("labels") or ()}
    held = [client.get("tasks", {}).get(task) or {} for client in run.clients.values()]
    for label, many in (pair for share in held for pair in (share.get("labels") or {}).items()):
        totals[label] = totals.get(label, 0.0) + (number(many) or 0.0)
    if run.task(task).get("kind") == "regression":
        return dict(sorted(totals.items(), key=lambda item: _lower_end(item[0])))
    return totals


def _lower_end(label: str) -> float:
    """Where a range such as "0.0-1.0" or "-1.0-0.0" begins; anything else keeps its place at the front."""
    try:
        return float(label[0] + label[1:].split("-")[0])
    except (ValueError, IndexError):
        return float("-inf")


def segments(labels: Mapping[str, object], colours: Mapping[str, str]) -> tuple[tuple[float, str], ...]:
    """Stacked (count, CSS class) in the order of `colours`, with the labels of one class added up."""
    totals: dict[str, float] = {}
    for label, colour in colours.items():
        totals[colour] = totals.get(colour, 0.0) + (number(labels.get(label)) or 0.0)
    return tuple((many, colour) for colour, many in totals.items() if many)


def label_legend(colours: Mapping[str, str]) -> Html:
    named = [(colour, label) for label, colour in colours.items() if colour != "other"]
    rest = list(colours.values()).count("other")
    return legend((*named, ("other", f"{rest} other labels")) if rest else named)


def spell(labels: Mapping[str, object]) -> str:
    """Label counts in words, the largest first where there are many."""
    pairs = [(label, number(many) or 0.0) for label, many in labels.items()]
    if len(pairs) > 12:
        pairs = sorted(pairs, key=lambda pair: -pair[1])[:12]
    words = ", ".join(f"{label} {count(many)}" for label, many in pairs)
    return words + ", …" if len(labels) > len(pairs) else words
