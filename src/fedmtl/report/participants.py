"""What each client contributed, and every failure by name."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from .contents import section
from .formats import MISSING, count, duration, number, plural, score, size
from .markup import Html, table, tag
from .partition import takes_part
from .record import Event, Run
from .results import last_evaluation

MOST_ROWS = 24
MOST_CLIENTS = 500


def participants(run: Run) -> Html:
    return section("clients", _contributions(run), _failures(run))


def _contributions(run: Run) -> Html:
    updates, failures = _by_client(run.updates), _by_client(run.failures)
    everybody = dict.fromkeys((*run.clients, *updates, *failures))
    if not everybody:
        return tag("p", "No client took part.")
    # Of a large population most clients were never asked: they are a number here, and rows in events.jsonl.
    asked = [client for client in everybody if client in updates or client in failures]
    clients = list(everybody) if len(everybody) <= MOST_CLIENTS else asked[:MOST_CLIENTS]
    scores = _scores(run)
    rows = []
    for client in clients:
        sent, failed = updates.get(client, []), failures.get(client, [])
        seconds = [known for event in sent if (known := number(event.get("seconds"))) is not None]
        row: list[object] = [
            client,
            takes_part(run.clients.get(client, {})),
            len(sent),
            tag("b", len(failed), class_="bad") if failed else 0,
            duration(fmean(seconds)) if seconds else MISSING,
            size(_sum(sent, "bytes_up")),
            size(_sum(sent, "bytes_down") + _sum(failed, "bytes_down")),
        ]
        rows.append([*row, scores.get(client, MISSING)] if scores else row)
    head = ["Client", "Rounds", "Updates", "Failures", "Mean time", "Up", "Down"]
    if scores:
        head.append("Own score, last evaluation")
    caption = "Clients"
    if len(clients) < len(everybody):
        shown = f"{count(len(clients))} of {plural(len(asked), 'client')} that were asked"
        caption = f"{shown}, of {count(len(everybody))} in all"
    return table(caption, head, rows, words={1, 7}, tall=len(rows) > MOST_ROWS)


def _by_client(events: tuple[Event, ...]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[str(event.get("client"))].append(event)
    return dict(found)


def _sum(events: list[Event], field: str) -> float:
    return sum(number(event.get(field)) or 0.0 for event in events)


def _scores(run: Run) -> dict[str, str]:
    """Main metrics per client in words, where tasks were scored at the clients."""
    found: dict[str, list[str]] = defaultdict(list)
    for task in run.tasks:
        for client, value in (last_evaluation(run, task).get("clients") or {}).items():
            found[client].append(f"{task} {score(number(value))}")
    return {client: ", ".join(words) for client, words in found.items()}


def _failures(run: Run) -> Html:
    if not run.failures:
        return tag("p", "No client failed.")
    rows = [
        (
            tag("b", event.get("client")),
            event.get("round"),
            event.get("reason"),
            size(event.get("bytes_down")),
        )
        for event in run.failures
    ]
    caption = f"{plural(len(rows), 'failure')}; a failed client's contribution is left out of its round"
    return table(caption, ("Client", "Round", "Reason", "Down"), rows, words={2}, tall=len(rows) > MOST_ROWS)
