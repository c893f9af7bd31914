"""A study's tables, once as values and then as CSV, markdown and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedmtl.report import formats
from fedmtl.report.markup import Html, join, notes, table, tag
from fedmtl.study.measures import Spread

Kind = Literal["words", "score", "number", "count", "bytes", "seconds", "percent"]
Value = Spread | str | None

_WORDS = {
    "score": formats.score,
    "number": lambda value: f"{value:.2f}",
    "count": formats.count,
    "bytes": formats.size,
    "seconds": formats.duration,
    "percent": formats.percent,
}
_COUNTED = ("count", "bytes")


@dataclass(frozen=True)
class Column:
    """`name` is what a reader sees, `key` what stands in the CSV."""

    name: str
    key: str
    kind: Kind = "score"


@dataclass(frozen=True)
class Table:
    """Rows of words and of means over seeds; `name` is its file's, None is missing or undefined."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


def to_csv(found: Table) -> str:
    """Numbers in full, each with its deviation over seeds where any row has one."""
    spreads = [_is_spread([row[at] for row in found.rows], column.kind) for at, column in enumerate(found.columns)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = zip(found.columns, spreads, strict=True)
    writer.writerow([name for column, both in head for name in [column.key, *([f"{column.key}_sd"] if both else [])]])
    for row in found.rows:
        writer.writerow(
            [part for value, both in zip(row, spreads, strict=True) for part in _plain(value)[: 2 if both else 1]]
        )
    return text.getvalue()


def _is_spread(values: Sequence[Value], kind: Kind) -> bool:
    # What is counted is the same for every seed, up to which examples were drawn.
    has_any = any(isinstance(value, Spread) and value.deviation is not None for value in values)
    return has_any and kind not in _COUNTED


def _plain(value: Value) -> tuple[str, str]:
    if isinstance(value, Spread):
        return f"{value.mean:.10g}", "" if value.deviation is None else f"{value.deviation:.10g}"
    return value or "", ""


def words(value: Value, kind: Kind) -> str:
    """A value as it is read: with its deviation where there are several seeds."""
    if value is None:
        return formats.MISSING
    if isinstance(value, str) or kind == "words":
        return str(value)
    main = _WORDS[kind](value.mean)
    return main if not value.deviation or kind in _COUNTED else f"{main} ± {_WORDS[kind](value.deviation)}"


def to_markdown(found: Table) -> str:
    """A table as GitHub draws it, with its notes below."""
    sides = ["---" if column.kind == "words" else "---:" for column in found.columns]
    lines = [_line([column.name for column in found.columns]), _line(sides)]
    lines += [_line([words(value, column.kind) for value, column in _paired(found, row)]) for row in found.rows]
    return "\n".join([f"### {found.title}", "", *lines, "", *(f"* {note}" for note in found.notes)]).rstrip() + "\n"


def _paired(found: Table, row: Sequence[Value]) -> list[tuple[Value, Column]]:
    return list(zip(row, found.columns, strict=True))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def to_html(found: Table) -> Html:
    """The table in a box that scrolls, the deviations in small print."""
    rows = [[_cell(value, column) for value, column in _paired(found, row)] for row in found.rows]
    texts = {at for at, column in enumerate(found.columns) if column.kind == "words"}
    head = [column.name for column in found.columns]
    return join((table(found.title, head, rows, words=texts, class_="study"), notes(found.notes)))


def _cell(value: Value, column: Column) -> object:
    main, sign, deviation = words(value, column.kind).partition(" ± ")
    return join((main, tag("small", f"± {deviation}"))) if sign else main
