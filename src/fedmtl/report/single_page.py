"""The page around what is to be shown, and pictures that stand alone: files that open offline."""

from __future__ import annotations

from pathlib import Path

from fedmtl.runs import write_atomic

from .markup import Html, tag
from .style import STYLE

# Wide tables: each row is one line, and the box scrolls where the window is narrow.
TABLE_STYLE = """
main.broad { max-width: 96rem }
.study th, .study td { white-space: nowrap; padding-right: .9rem } .study tbody th { max-width: none }
.study { font-size: .84rem } .study td small { white-space: nowrap }
.study thead th { white-space: normal; max-width: 9rem }
"""


def single_page(title: str, *content: object, style: str = "", class_: str | None = None) -> str:
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
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *content, class_=class_)), lang='en')}\n"


def write_svg(path: Path, picture: Html, style: str = "") -> None:
    """A picture as a file that needs nothing else."""
    sheet = tag("style", Html(STYLE + style + "svg { background: var(--paper) }"))
    opened = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    at = opened.index(">") + 1
    write_atomic(path, f"{opened[:at]}{sheet}{opened[at:]}\n".encode())
