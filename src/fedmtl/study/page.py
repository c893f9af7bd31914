"""The page around what a study has to show: one file that opens offline."""

from __future__ import annotations

from fedmtl.report.markup import Html, tag
from fedmtl.report.style import STYLE


def study_page(title: str, *content: object, style: str = "") -> str:
    """The page of these parts; the same parts give the same text."""
    # The browser itself then refuses anything that is not in this file.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Html(STYLE + style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *content)), lang='en')}\n"
