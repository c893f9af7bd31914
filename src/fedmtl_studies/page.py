"""What a study writes: tables as CSV, markdown and HTML, figures, and one page that opens offline."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from fedmtl_studies.figures import FIGURE_STYLE, Figures, write_svg
from fedmtl_studies.folder import StudyFolder
from fedmtl_studies.library import (
    MISSING,
    TABLE_STYLE,
    Html,
    count,
    duration,
    html_table,
    join,
    notes,
    percent,
    score,
    single_page,
    size,
    tag,
    write_atomic,
    write_yaml,
)
from fedmtl_studies.results import Spread

ResultT = TypeVar("ResultT")
Kind = Literal["words", "score", "number", "count", "bytes", "seconds", "percent"]
Value = Spread | str | None

_WORDS = {
    "score": score,
    "number": lambda value: f"{value:.2f}",
    "count": count,
    "bytes": size,
    "seconds": duration,
    "percent": percent,
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
    """Return a table as CSV: numbers in full, each with its deviation over seeds where any row has one."""
    spreads = [_is_spread([row[at] for row in found.rows], column.kind) for at, column in enumerate(found.columns)]
    named = zip(found.columns, spreads, strict=True)
    head = [name for column, both in named for name in [column.key, *([f"{column.key}_sd"] if both else [])]]
    return csv_text(
        head,
        (
            [part for value, both in zip(row, spreads, strict=True) for part in _plain(value)[: 2 if both else 1]]
            for row in found.rows
        ),
    )


def csv_text(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return rows under a head as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


class Scored(Protocol):
    """A result that has every metric of each task."""

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float | None]]: ...


def metric_columns(cells: Iterable[Scored], tasks: Sequence[str]) -> dict[str, Callable[[Scored], object]]:
    """Return a column for every metric of every task that one of the cells has."""

    def take(task: str, metric: str) -> Callable[[Scored], object]:
        return lambda cell: cell.metrics.get(task, {}).get(metric)

    named = dict.fromkeys((task, metric) for cell in cells for task in tasks for metric in cell.metrics.get(task, {}))
    in_order = sorted(named, key=lambda one: tasks.index(one[0]))
    return {f"{task}_{metric}": take(task, metric) for task, metric in in_order}


def cells_csv(cells: Iterable[ResultT], columns: Mapping[str, Callable[[ResultT], object]]) -> str:
    """Return one row for every finished cell, with what each column takes of it."""
    return csv_text(list(columns), ([take(cell) for take in columns.values()] for cell in cells))


def _is_spread(values: Sequence[Value], kind: Kind) -> bool:
    # What is counted is the same for every seed, up to which examples were drawn.
    has_any = any(isinstance(value, Spread) and value.deviation is not None for value in values)
    return has_any and kind not in _COUNTED


def _plain(value: Value) -> tuple[str, str]:
    if isinstance(value, Spread):
        return f"{value.mean:.10g}", "" if value.deviation is None else f"{value.deviation:.10g}"
    return value or "", ""


def words(value: Value, kind: Kind) -> str:
    """Return a value as it is read: with its deviation where there are several seeds."""
    if value is None:
        return MISSING
    if isinstance(value, str) or kind == "words":
        return str(value)
    main = _WORDS[kind](value.mean)
    return main if not value.deviation or kind in _COUNTED else f"{main} ± {_WORDS[kind](value.deviation)}"


def to_markdown(found: Table) -> str:
    """Return a table as GitHub draws it, with its notes below."""
    sides = ["---" if column.kind == "words" else "---:" for column in found.columns]
    lines = [_line([column.name for column in found.columns]), _line(sides)]
    lines += [_line([words(value, column.kind) for value, column in _paired(found, row)]) for row in found.rows]
    return "\n".join([f"### {found.title}", "", *lines, "", *(f"* {note}" for note in found.notes)]).rstrip() + "\n"


def _paired(found: Table, row: Sequence[Value]) -> list[tuple[Value, Column]]:
    return list(zip(row, found.columns, strict=True))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def to_html(found: Table) -> Html:
    """Return the table in a box that scrolls, the deviations in small print."""
    rows = [[_cell(value, column) for value, column in _paired(found, row)] for row in found.rows]
    texts = {at for at, column in enumerate(found.columns) if column.kind == "words"}
    head = [column.name for column in found.columns]
    return join((html_table(found.title, head, rows, words=texts, class_="study"), notes(found.notes)))


def _cell(value: Value, column: Column) -> object:
    main, sign, deviation = words(value, column.kind).partition(" ± ")
    return join((main, tag("small", f"± {deviation}"))) if sign else main


@dataclass(frozen=True)
class Page:
    """What there is to show of a study: `remarks` are lines above all tables, `sheets` further CSV files by name.

    Figures stand behind the tables unless `figures_first`; `style` is theirs.
    """

    opening: str
    guide: str
    tables: Sequence[Table]
    figures: Figures
    remarks: Sequence[str] = ()
    sheets: Mapping[str, str] = field(default_factory=dict)
    style: str = ""
    figures_first: bool = False


def write_pages(folder: StudyFolder, study: str, title: str, page: Page, about: Mapping[str, Any]) -> None:
    """Write all files of a study, each replaced as a whole; `about` is what the study was to do."""
    for table in page.tables:
        write_atomic(folder.path / f"{table.name}.csv", to_csv(table).encode())
    for name, text in page.sheets.items():
        write_atomic(folder.path / f"{name}.csv", text.encode())
    for name, (_, picture) in page.figures.items():
        write_svg(folder.figures / f"{name}.svg", picture, page.style)
    write_atomic(folder.markdown, _markdown(page).encode())
    write_atomic(folder.page, _html(folder.path.name, study, title, page, about).encode())


def _markdown(page: Page) -> str:
    plain = "\n".join(textwrap.wrap(page.guide, 120))
    remarks = [*(f"* {line}" for line in page.remarks), ""] if page.remarks else []
    return "\n".join([f"{page.opening}\n", f"{plain}\n", *remarks, *map(to_markdown, page.tables)])


def _html(name: str, study: str, title: str, page: Page, about: Mapping[str, Any]) -> str:
    drawn = (tag("figure", tag("figcaption", tag("b", words)), picture) for words, picture in page.figures.values())
    figures = tag("section", tag("h2", "Figures"), tag("div", *drawn, class_="panels")) if page.figures else ""
    tables = [tag("section", to_html(table)) for table in page.tables]
    return single_page(
        f"{name}: {title}",
        tag("p", f"fedmtl study {study}", class_="kicker"),
        tag("h1", name),
        tag("p", page.opening, class_="lede"),
        notes(page.remarks),
        tag("p", page.guide.replace("`", ""), class_="guide"),
        *([figures, *tables] if page.figures_first else [*tables, figures]),
        tag("section", tag("h2", "What was asked"), tag("pre", tag("code", write_yaml(dict(about))))),
        style=TABLE_STYLE + FIGURE_STYLE + page.style,
        class_="broad",
    )
