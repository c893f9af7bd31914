"""What a run's events say of privacy, in sentences: what was spent, for whom, and what is not covered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedmtl.runs.event_lines import Event, first_of, last_of
from fedmtl.runs.events import EndEvent, ExamplePrivacyEvent, ExampleSpending, RoundEvent, SiteEvent

UNIT = "one example of one task at one client, data sets being neighbours if one has one example more"
NOT_COVERED = (
    "not covered: training losses, numbers of examples and of labels, validation scores, the choice of settings and of"
    " the encoder and its vocabulary; a text in two tasks or at two clients is two examples"
)


def rounded_up(epsilon: float) -> str:
    """An epsilon with two digits behind the point, never a smaller one."""
    return f"{math.ceil(epsilon * 100 - 1e-9) / 100:g}"


def unfinished(events: Sequence[Event]) -> list[str]:
    """What a statement does not have of a run that ended within a round, and has not gone on."""
    last = next((event for event in reversed(events) if isinstance(event, EndEvent | RoundEvent)), None)
    if not isinstance(last, EndEvent) or last.status == "done":
        return []
    return [
        f"the run ended within round {(last.rounds or 0) + 1}, of which the statement has nothing: where updates had"
        " been sent, or sums opened, one round more was released"
    ]


def privacy_lines(events: Sequence[Event]) -> list[str]:
    """The statement of a run, one sentence a line; none where no noise was added."""
    found = last_of(events, ExamplePrivacyEvent)
    if found is None:
        return []
    worded: dict[str, list[str]] = {}
    for task, one in found.tasks.items():
        worded.setdefault(_worded(one, found.delta), []).append(task)
    parts = "; ".join(f"{words} ({', '.join(tasks)})" for words, tasks in worded.items())
    lines = [f"privacy of examples after round {found.round}: {parts}; for {UNIT}", NOT_COVERED]
    if any(one.jobs is not None for one in found.tasks.values()):
        most = max(one.jobs or 0 for one in found.tasks.values())
        lines.append(
            f"updates were summed under masks, so no client told what it spent: each checked its own ledger before it"
            f" answered one of at most {most} jobs, and the statement rests on the clients' own code"
        )
    unconfirmed = sum(one.unconfirmed for one in found.tasks.values())
    unknown = sum(one.unknown for one in found.tasks.values())
    if unconfirmed:
        lines.append(
            f"{unconfirmed} jobs had no accepted update and count as done"
            + (f"; of {unknown} clients, which never sent one, it is not known what they released" if unknown else "")
        )
    lines += unfinished(events)
    if first_of(events, SiteEvent) is None:
        lines.append("clients were simulated: their noise follows from the seed, which a site's never does")
    return lines


def _worded(one: ExampleSpending, delta: float) -> str:
    bound, by = {
        "pld": ("", "privacy loss distributions"),
        "bound": ("at most ", "the config's bound, which each client's noise is for"),
    }.get(one.accountant, ("at most ", "Renyi orders"))
    return f"{bound}epsilon {rounded_up(one.epsilon)} at delta {delta:g} by {by}"
