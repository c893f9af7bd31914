"""A run's page has a top (what ran, how it ended, what it cost) and sections in a fixed order."""

from __future__ import annotations

from fedmtl.report.formats import MISSING, count, duration, known, plural, score, size
from fedmtl.report.markup import Html, join, tag
from fedmtl.report.record import Run, average, summarize

TITLES = {
    "results": "Results",
    "curves": "Curves",
    "partition": "Clients and tasks",
    "sharing": "Sharing plan",
    "cost": "Bytes and seconds",
    "errors": "Predictions",
    "clients": "Contributions and failures",
    "data": "Data",
    "config": "Config",
}
# What a run says of itself is marked, but for how far it is ahead and what it hides.
_LOOK = {"ahead": "good", "privacy": "good"}
_STATUS = {"done": "done", "interrupted": "interrupted", "failed": "failed"}


def section(anchor: str, *content: object) -> Html:
    return tag("section", tag("h2", TITLES[anchor]), *content, id=anchor)


def links() -> Html:
    """One link per section."""
    return tag(
        "nav",
        *(tag("a", title, href=f"#{anchor}") for anchor, title in TITLES.items()),
        aria_label="Sections",
    )


def masthead(run: Run) -> Html:
    return tag(
        "header",
        tag("p", "fedmtl run report", class_="kicker"),
        tag("h1", run.name),
        tag("p", *_badges(run), class_="badges"),
        tag("p", _lede(run), class_="lede"),
        *(tag("p", verdict.words, class_=f"verdict {_LOOK.get(verdict.code, 'bad')}") for verdict in run.verdicts),
        _facts(run),
    )


def _badges(run: Run) -> list[Html]:
    status = run.end.status
    words = status or "not ended"
    look = _STATUS.get(words, "open")
    badges = [tag("span", words, class_=f"badge {look}")]
    if run.start.synthetic:
        title = "The texts and labels were generated; scores say nothing about real data."
        badges.append(tag("span", "synthetic data", class_="badge synthetic", title=title))
    if run.end.reason:
        badges.append(tag("span", run.end.reason, class_="reason"))
    elif not status:
        badges.append(tag("span", "No end was recorded: the run is still going, or was killed.", class_="reason"))
    return badges


def _lede(run: Run) -> str:
    scale = f"{plural(len(run.tasks), 'task')}, {plural(len(run.clients), 'client')}, {_rounds(run)} rounds."
    summary = summarize(average(run, "overall"))
    if summary.final is None:
        return scale
    if summary.start is None or not run.last_round:
        return f"{scale} The overall score is {score(summary.final)}."
    return f"{scale} The overall score went from {score(summary.start)} to {score(summary.final)}."


def _rounds(run: Run) -> str:
    done = run.last_round if run.end.rounds is None else run.end.rounds
    planned = done if run.start.num_rounds is None else run.start.num_rounds
    return count(done) if done == planned else f"{count(done)} of {count(planned)}"


def _facts(run: Run) -> Html:
    start = run.start
    facts: list[tuple[str, object]] = [
        ("Mode", known(start.mode).replace("_", " ")),
        ("Encoder", known(start.encoder)),
        ("Seed", known(start.seed)),
        ("Rounds", _rounds(run)),
        ("Time", _seconds(run)),
        ("Sent by clients", _bytes(sum(event.bytes_up or 0 for event in run.rounds.values()))),
        ("Sent to clients", _bytes(sum(event.bytes_down or 0 for event in run.rounds.values()))),
        ("Computed on", _machine(run)),
        *([("A training step", _passes(run))] if _passes(run) else []),
        ("Versions", _versions(run)),
        ("Weights, SHA-256", _hash(run.end.weights_sha256)),
    ]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts), class_="facts")


def _seconds(run: Run) -> Html:
    spent = run.end.seconds
    if spent is None:
        spent = sum(event.seconds or 0.0 for event in run.rounds.values())
    return tag("span", duration(spent), title=f"{spent:,.1f} s")


def _bytes(total: int) -> Html:
    return tag("span", size(total), title=f"{total:,.0f} bytes, the sum over rounds")


def _machine(run: Run) -> str:
    device, workers, stack = known(run.start.device), run.start.workers, run.start.stack
    kernels = f", {run.start.kernels} kernels" if run.start.kernels else ""
    if stack:
        return f"{device}, {plural(stack, 'client')} at once, {known(run.start.precision)}{kernels}"
    return f"{device}, {plural(workers, 'worker')}{kernels}" if workers else f"{device}{kernels}"


def _passes(run: Run) -> str:
    """What a step costs, where that is more than the one pass everybody expects."""
    passes = run.start.step_passes or {}
    forward, backward = (passes.get(way) or 1 for way in ("forward", "backward"))
    return f"{forward} passes forward, {backward} back" if forward > 1 else ""


def _versions(run: Run) -> str:
    versions = {"fedmtl": run.start.version, "torch": run.start.torch, "transformers": run.start.transformers}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or MISSING


def _hash(digest: str | None) -> Html:
    """The whole hash: only the style sheet cuts it short, so that one click selects, and copies, all of it."""
    if not digest:
        return join((MISSING,))
    return tag("code", digest, class_="hash", title=digest, tabindex="0")
