"""The cost sections show what each round and each client took (bytes, seconds) and every failure by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TypeVar

from fedmtl.report.charts import Bar, Frame, Label, bar_chart, bar_range, x_axis
from fedmtl.report.data import takes_part
from fedmtl.report.formats import MISSING, count, duration, percent, plural, score, size
from fedmtl.report.markup import Html, legend, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run
from fedmtl.report.results import last_evaluation
from fedmtl.runs.energy import energy_words
from fedmtl.runs.events import ClientFacts, FailureEvent, RoundEvent, UpdateEvent

MOST_ROWS = 24
MOST_CLIENTS = 500

OfClient = TypeVar("OfClient", UpdateEvent, FailureEvent)


def traffic(run: Run) -> Html:
    rounds = {at: event for at, event in run.rounds.items() if at > 0}
    if not rounds:
        return section("cost", tag("p", "No round was finished."))
    panels = tag("div", _bytes(rounds), _seconds(rounds), _answers(rounds), class_="panels")
    notes = [_distillation(run)] if run.distillations else []
    if run.energy is not None:
        notes.append(f"Energy, over all sessions of the run on this machine: {energy_words(run.energy)}.")
    return section("cost", panels, *(tag("p", note, class_="guide") for note in notes))


def _bytes(rounds: dict[int, RoundEvent]) -> Html:
    bars = []
    for at, event in rounds.items():
        up, down = event.bytes_up or 0, event.bytes_down or 0
        words = f"round {at}: {size(up)} up, {size(down)} down"
        bars.append(_bar(at, rounds, ((up, "up"), (-down, "down")), words))
    if not any(value for bar in bars for value, _ in bar.segments):
        return tag("figure", tag("figcaption", tag("b", "Bytes")), tag("p", "Nothing was sent.", class_="guide"))
    total_up = sum(event.bytes_up or 0 for event in rounds.values())
    total_down = sum(event.bytes_down or 0 for event in rounds.values())
    words = f"{size(total_up)} up and {size(total_down)} down in all rounds together."
    chart = _chart(bars, "Bytes per round", words, lambda value: size(abs(value)) if value else "0")
    key = legend((("up", "up, from clients"), ("down", "down, to clients")))
    return tag("figure", tag("figcaption", tag("b", "Bytes per round")), chart, key)


def _seconds(rounds: dict[int, RoundEvent]) -> Html:
    bars = []
    for at, event in rounds.items():
        train, evaluate = event.train_seconds or 0.0, event.evaluate_seconds or 0.0
        other = max(0.0, (event.seconds or 0.0) - train - evaluate)
        words = f"round {at}: {duration(train)} train, {duration(evaluate)} evaluate, {duration(other)} other"
        bars.append(_bar(at, rounds, ((train, "up"), (evaluate, "down"), (other, "other")), words))
    total = sum(event.seconds or 0.0 for event in rounds.values())
    chart = _chart(bars, "Seconds per round", f"{duration(total)} in all rounds together.", None)
    key = legend((("up", "training"), ("down", "evaluation"), ("other", "other")))
    return tag("figure", tag("figcaption", tag("b", "Seconds per round")), chart, key)


def _answers(rounds: dict[int, RoundEvent]) -> Html:
    bars = []
    for at, event in rounds.items():
        accepted, failed = event.clients or 0, event.failures or 0
        words = f"round {at}: {accepted} accepted, {failed} failed"
        bars.append(_bar(at, rounds, ((accepted, "up"), (failed, "wrong")), words))
    failures = sum(event.failures or 0 for event in rounds.values())
    chart = _chart(bars, "Clients per round", f"{failures} failures in all rounds together.", None)
    key = legend((("up", "accepted"), ("wrong", "failed")))
    return tag("figure", tag("figcaption", tag("b", "Clients per round")), chart, key)


def _distillation(run: Run) -> str:
    """Say what the server's distillation cost, and how its losses changed."""
    seconds = sum(event.seconds or 0.0 for event in run.distillations)
    steps = sum(event.steps or 0 for event in run.distillations)
    first, last = run.distillations[0].losses, run.distillations[-1].losses
    losses = (f"{task} {score(first.get(task))} to {score(last.get(task))}" for task in {**first, **last})
    return (
        f"After its mean the server distilled the model from a teacher: {steps:,} steps in"
        f" {duration(seconds)}, part of `other`. Loss in the first and the last round: {', '.join(losses)}."
    )


def _bar(at: int, rounds: dict[int, RoundEvent], segments: tuple[tuple[float, str], ...], words: str) -> Bar:
    # Gaps between very thin bars flicker.
    half = 0.4 if len(rounds) <= 50 else 0.5
    return Bar(at - half, at + half, segments, words)


def _chart(bars: list[Bar], title: str, words: str, label: Label | None) -> Html:
    # A lone bar should not be as wide as the picture.
    right = max(bars[-1].right, bars[0].left + 6)
    frame = Frame(x=(bars[0].left - 0.1, right + 0.1), y=bar_range(bars), left=56)
    return bar_chart(frame, bars, title=title, description=words, axis=x_axis(frame, "round"), label=label)


def participants(run: Run) -> Html:
    """What each client brought: its examples, losses, scores and weight in the means, what it cost, and failures."""
    updates, failures = _by_client(run.updates), _by_client(run.failures)
    everybody = dict.fromkeys((*run.clients, *updates, *failures))
    if not everybody:
        return section("clients", tag("p", "No client took part."), _failures(run))
    # Of a large population most clients were never sampled: they are a number here, and rows in events.jsonl.
    sampled = [client for client in everybody if client in updates or client in failures]
    clients = list(everybody) if len(everybody) <= MOST_CLIENTS else sampled[:MOST_CLIENTS]
    caption = ""
    if len(clients) < len(everybody):
        shown = f"{count(len(clients))} of {plural(len(sampled), 'client')} that were sampled"
        caption = f": {shown}, of {count(len(everybody))} in all"
    trained = [client for client in clients if updates.get(client)]
    return section(
        "clients",
        *(_contributions(run, trained, updates, caption) if trained else ()),
        _costs(run, clients, updates, failures, caption),
        _failures(run),
    )


def _contributions(
    run: Run, clients: list[str], updates: Mapping[str, list[UpdateEvent]], caption: str
) -> tuple[Html, ...]:
    """A row for each task of each client that an update was accepted from."""
    scores = {task: (last.clients if (last := last_evaluation(run, task)) else None) or {} for task in run.tasks}
    has_shares = any(event.shares for event in run.updates)
    rows = []
    for client in clients:
        sent = updates[client]
        for number, task in enumerate(dict.fromkeys(task for event in sent for task in event.tasks)):
            losses = [event.tasks[task].loss for event in sent if task in event.tasks]
            examples = [event.tasks[task].examples for event in sent if task in event.tasks]
            row: list[object] = [
                client,
                task,
                count(examples[-1]),
                score(losses[0]),
                score(losses[-1]),
            ]
            if any(scores.values()):
                row.append(score(scores.get(task, {}).get(client)))
            if has_shares:
                row += [_share(sent, f"task:{task}"), _shared(sent) if number == 0 else ""]
            rows.append(row)
    if not rows:
        return (
            tag(
                "p",
                "What each client brought is not known: the server opened sums of clients alone (secure aggregation),"
                " so that there are no losses, scores or shares of single ones.",
            ),
        )
    head = ["Client", "Task", "Examples", "Loss, first round", "Last round"]
    head += ["Score, last evaluation"] if any(scores.values()) else []
    head += ["Share of the task’s mean", "Share of the shared mean"] if has_shares else []
    box = table(f"What each client brought{caption}", head, rows, words={1}, tall=len(rows) > MOST_ROWS)
    return box, tag("p", *_contribution_notes(run, has_shares, any(scores.values())), class_="guide")


def _contribution_notes(run: Run, has_shares: bool, has_scores: bool) -> list[str]:
    notes = ["Losses are of training, in the first and the last round that a client returned."]
    if has_shares:
        notes.append(
            " Shares are of the weight in the average of the task’s values (its head) and of those that tasks share,"
            " before any clipping, as a mean over the client’s rounds."
        )
    if not has_scores:
        notes.append(" There are no scores by client: the model was scored on the server’s examples.")
    if len(run.clients) > 1 and run.start.mode in ("federated", "federated_single_task"):
        last = 1 + max(run.start.num_rounds or 0, run.last_round)
        notes.append(
            " What the model would lose without a client was not measured, as it takes a run: of a client NAME that the"
            f" config names, fedmtl run config.yaml --set clients.NAME.from_round={last} --name without, and fedmtl"
            f" compare {run.name} without."
        )
    return notes


def _share(sent: Iterable[UpdateEvent], scope: str) -> str:
    """A client's mean share of a scope over the rounds in which it returned values of it."""
    found = [share for event in sent if (share := (event.shares or {}).get(scope)) is not None]
    return percent(fmean(found)) if found else MISSING


def _shared(sent: list[UpdateEvent]) -> str:
    """Its shares of what several tasks share, in words: one number where that is the encoder alone."""
    scopes = dict.fromkeys(scope for event in sent for scope in event.shares or {})
    wide = [scope for scope in scopes if not scope.startswith(("task:", "client:"))]
    if wide == ["all"]:
        return _share(sent, "all")
    return ", ".join(f"{scope} {_share(sent, scope)}" for scope in wide) or MISSING


def _costs(
    run: Run,
    clients: list[str],
    updates: Mapping[str, list[UpdateEvent]],
    failures: Mapping[str, list[FailureEvent]],
    caption: str,
) -> Html:
    rows = []
    for client in clients:
        sent, failed = updates.get(client, []), failures.get(client, [])
        seconds = [event.seconds for event in sent if event.seconds is not None]
        row: list[object] = [
            client,
            takes_part(run.clients.get(client, ClientFacts())),
            len(sent),
            tag("b", len(failed), class_="bad") if failed else 0,
            duration(fmean(seconds)) if seconds else MISSING,
            size(sum(event.bytes_up or 0 for event in sent)),
            size(sum(event.bytes_down or 0 for event in sent) + sum(event.bytes_down or 0 for event in failed)),
        ]
        rows.append(row)
    head = ["Client", "Rounds", "Updates", "Failures", "Mean time", "Up", "Down"]
    return table(f"What each client took{caption}", head, rows, words={1}, tall=len(rows) > MOST_ROWS)


def _by_client(events: Iterable[OfClient]) -> dict[str, list[OfClient]]:
    found: dict[str, list[OfClient]] = defaultdict(list)
    for event in events:
        found[event.client].append(event)
    return dict(found)


def _failures(run: Run) -> Html:
    if not run.failures:
        return tag("p", "No client failed.")
    rows = [
        (
            tag("b", event.client),
            event.round,
            event.reason,
            size(event.bytes_down),
        )
        for event in run.failures
    ]
    caption = f"{plural(len(rows), 'failure')}; a failed client's contribution is left out of its round"
    return table(caption, ("Client", "Round", "Reason", "Down"), rows, words={2}, tall=len(rows) > MOST_ROWS)
