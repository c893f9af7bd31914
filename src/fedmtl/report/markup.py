"""HTML as values: text is escaped unless it is `Html` already, so data cannot become markup."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape as escape_text

_WITHOUT_END = frozenset({"meta", "br"})


class Html(str):
    """Markup; everything else is text."""

    __slots__ = ()


def escape(value: object) -> Html:
    """`value` as markup: unchanged when it is markup, escaped when it is anything else."""
    return value if isinstance(value, Html) else Html(escape_text(str(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(escape(between).join(escape(part) for part in parts))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """One element. `class_` is `class`, `stroke_width` is `stroke-width`; None and False are left out."""
    opened = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _WITHOUT_END:
        return Html(f"<{opened}>")
    return Html(f"<{opened}>{join(content)}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, float):
        value = f"{value:.1f}".removesuffix(".0")
    return f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    words: Collection[int] = (),
    tall: bool = False,
    class_: str | None = None,
) -> Html:
    """A table in a box that scrolls; columns hold numbers unless their index is in `words`."""

    def side(column: int) -> str | None:
        return None if column == 0 or column in words else "number"

    top = tag("tr", *(tag("th", cell, scope="col", class_=side(i)) for i, cell in enumerate(head)))
    body = (
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=side(i)) for i, cell in enumerate(row[1:], start=1)),
        )
        for row in rows
    )
    inside = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *body), class_=class_)
    box = "scroll tall" if tall else "scroll"
    return tag("div", inside, class_=box, tabindex="0", role="region", aria_label=caption)


def notes(lines: Iterable[object]) -> Html:
    """Remarks under a table or a figure; nothing when there are none."""
    items = [tag("li", line) for line in lines]
    return tag("ul", *items, class_="notes") if items else Html()


def notices(lines: Iterable[object]) -> Html:
    """Short sentences at the top of a page about what a reader must know before the numbers; nothing for none."""
    items = [tag("li", line) for line in lines]
    return tag("ul", *items, class_="notices", aria_label="Notices") if items else Html()


def legend(entries: Iterable[tuple[str, object]]) -> Html:
    """Colour swatches with their words; an entry is (CSS class, words)."""
    items = (tag("li", tag("span", class_=f"swatch {colour}"), words) for colour, words in entries)
    return tag("ul", *items, class_="legend")
