"""Where the rounds' seconds went, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

Event = Mapping[str, Any]


def profile_table(events: Iterable[Event], workers: int) -> Table | None:
    """Seconds per round, the mean over rounds of training; without the first where there are more, as it warms up."""
    rounds = [event for event in events if event["event"] == "profile" and event["round"] > 0]
    shown = rounds[1:] or rounds
    if not shown:
        return None
    total = fmean(event["seconds"] for event in shown)
    table = Table(title=f"where a round's {total:.2f} s went", title_justify="left")
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="right" if column else "left")
    for label, seconds in _means(shown, "server"):
        table.add_row(label, f"{seconds:.3f}", f"{seconds / total:.1%}")
    inside = list(_means(shown, "clients"))
    if inside:
        table.add_section()
        spent = sum(seconds for _, seconds in inside)
        where = f"{workers} workers" if workers > 1 else "one worker"
        table.add_row(f"at the clients, {where} together", f"{spent:.3f}", "")
        for label, seconds in inside:
            table.add_row(f"  {label}", f"{seconds:.3f}", f"{seconds / spent:.1%}")
    return table


def _means(rounds: Sequence[Event], side: str) -> list[tuple[str, float]]:
    labels = dict.fromkeys(label for event in rounds for label in event[side])
    means = ((label, fmean(event[side].get(label, 0.0) for event in rounds)) for label in labels)
    return sorted(means, key=lambda item: -item[1])
