"""One run folder -> one page that opens offline."""

from __future__ import annotations

from pathlib import Path

from fedmtl.errors import RunNotFound
from fedmtl.report.costs import participants, traffic
from fedmtl.report.curves import curves, overview
from fedmtl.report.data import datasets, partition
from fedmtl.report.markup import Html, tag
from fedmtl.report.outline import links, masthead, section
from fedmtl.report.predictions import predictions
from fedmtl.report.privacy import privacy
from fedmtl.report.record import Run, gather
from fedmtl.report.results import results
from fedmtl.report.sharing import sharing
from fedmtl.report.single_page import STYLE
from fedmtl.runs.event_lines import Event
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.runs.log import read_events


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder, whatever state the run is in, never half of it."""
    run = RunFolder(folder)
    if not run.events.exists():
        raise RunNotFound(f"{run.events}: no such file; name the folder of a run, such as runs/first")
    config_text = run.config.read_text(encoding="utf-8", errors="replace") if run.config.exists() else ""
    page = render(read_events(run), config_text, folder.resolve().name)
    # A JSON string may hold half a surrogate pair, which no encoding can write.
    write_atomic(run.report, page.encode("utf-8", "replace"))
    return run.report


def render(events: list[Event], config_text: str, name: str) -> str:
    """The page for these events; the same input gives the same text."""
    run = gather(events, name)
    body = tag(
        "body",
        tag("main", masthead(run), links(), *_content(run, config_text)),
    )
    return f"<!doctype html>\n{tag('html', _head(name), body, lang='en')}\n"


def _content(run: Run, config_text: str) -> list[Html]:
    parts = (curves, partition, sharing, privacy, traffic, predictions, participants, datasets)
    return [results(run, overview(run)), *(part(run) for part in parts), _config(config_text)]


def _config(text: str) -> Html:
    if not text:
        return section("config", tag("p", "The run folder has no config.yaml."))
    shown = tag("details", tag("summary", "The whole config of this run"), tag("pre", tag("code", text)))
    guide = "Complete, with every default filled in; running it again gives the same weights."
    return section("config", tag("p", guide, class_="guide"), shown)


def _head(name: str) -> Html:
    # The browser itself then refuses anything that is not in this file.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{name}: fedmtl run report"),
        tag("style", Html(STYLE)),
    )
