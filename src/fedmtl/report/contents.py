"""The sections of the page, in order."""

from __future__ import annotations

from .markup import Html, tag

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


def section(anchor: str, *content: object) -> Html:
    return tag("section", tag("h2", TITLES[anchor]), *content, id=anchor)


def links() -> Html:
    """One link per section."""
    return tag(
        "nav",
        *(tag("a", title, href=f"#{anchor}") for anchor, title in TITLES.items()),
        aria_label="Sections",
    )
