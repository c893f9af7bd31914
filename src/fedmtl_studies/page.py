"""What a study writes: tables as CSV, markdown and HTML, figures, and one page that opens offline."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    notices,
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
MARK = "†"
OPEN_FIGURES = 3
OPEN_ROWS = 12
# The column that says most of a row, the first of these that a table has.
LEADING = ("mean", "average", "mean_retention", "accuracy")


@dataclass(frozen=True)
class Column:
    """`name` is what a reader sees, `key` what stands in the CSV, `chance` what one answer for all examples scores."""

    name: str
    key: str
    kind: Kind = "score"
    chance: float | None = None

    def is_chance(self, value: Value) -> bool:
        """Say whether a score is no better than one answer for every example, up to rounding."""
        return isinstance(value, Spread) and self.chance is not None and value.mean <= self.chance + 1e-9


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
    lines += [_line([_text(value, column) for value, column in _paired(found, row)]) for row in found.rows]
    return "\n".join([f"### {found.title}", "", *lines, "", *(f"* {note}" for note in found.notes)]).rstrip() + "\n"


def _text(value: Value, column: Column) -> str:
    return f"{words(value, column.kind)}{MARK if column.is_chance(value) else ''}"


def _paired(found: Table, row: Sequence[Value]) -> list[tuple[Value, Column]]:
    return list(zip(row, found.columns, strict=True))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def to_html(found: Table) -> Html:
    """Return the table in a box that scrolls, the deviations in small print, scores of chance with a dagger."""
    rows = [[_cell(value, column) for value, column in _paired(found, row)] for row in found.rows]
    texts = {at for at, column in enumerate(found.columns) if column.kind == "words"}
    head = [column.name for column in found.columns]
    return join((html_table(found.title, head, rows, words=texts, class_="study"), notes(found.notes)))


def _cell(value: Value, column: Column) -> object:
    main, sign, deviation = words(value, column.kind).partition(" ± ")
    parts: list[object] = [main]
    if column.is_chance(value):
        parts.append(tag("sup", MARK, title="no better than one answer for every example"))
    if sign:
        parts.append(tag("small", f"± {deviation}"))
    return join(parts) if len(parts) > 1 else main


def with_chance(page: Page, levels: Mapping[str, float]) -> Page:
    """Return the page with a dagger at every score that is no better than chance, and a sentence if there is one.

    `levels` has by the key of a column what one answer for every example scores.
    """
    tables = []
    num_scores = num_marked = 0
    for table in page.tables:
        columns = tuple(replace(column, chance=levels.get(column.key, column.chance)) for column in table.columns)
        marked = [column for at, column in enumerate(columns) if any(column.is_chance(row[at]) for row in table.rows)]
        num_scores += sum(
            isinstance(row[at], Spread)
            for row in table.rows
            for at, one in enumerate(columns)
            if one.chance is not None
        )
        num_marked += sum(column.is_chance(row[at]) for row in table.rows for at, column in enumerate(columns))
        note = ", ".join(f"{column.name} {score(column.chance)}" for column in marked)
        notes_ = (
            (*table.notes, f"{MARK} no better than one answer for every example: {note}.") if marked else table.notes
        )
        tables.append(replace(table, columns=columns, notes=notes_))
    if not num_marked:
        return replace(page, tables=tables)
    warning = (
        f"{num_marked} of {num_scores} scores in the tables are no better than one answer for every example ({MARK}):"
        " differences between them say nothing."
    )
    return replace(page, tables=tables, warnings=[*page.warnings, warning])


def leading_rows(found: Table) -> str:
    """Return in a sentence which rows of a table are first, second and last, by its mean or its first score."""
    at = next(
        (at for key in LEADING for at, column in enumerate(found.columns) if column.key == key),
        next((at for at, column in enumerate(found.columns) if column.kind == "score"), None),
    )
    if at is None:
        return ""
    column = found.columns[at]
    scored = [(value.mean, row) for row in found.rows if isinstance(value := row[at], Spread)]
    ranked = [row for _, row in sorted(scored, key=lambda one: one[0], reverse=True)]
    if len(ranked) < 2:
        return ""

    def named(row: tuple[Value, ...]) -> str:
        name = ", ".join(
            str(value)
            for value, one in zip(row[:at], found.columns, strict=False)
            if one.kind == "words" and isinstance(value, str)
        )
        return f"{name} ({words(row[at], column.kind)})"

    last = f"; the lowest of {len(ranked)} is {named(ranked[-1])}" if len(ranked) > 2 else ""
    return f"{found.title}: the highest {column.name} is that of {named(ranked[0])}, then {named(ranked[1])}{last}."


@dataclass(frozen=True)
class Page:
    """What there is to show of a study: `remarks` are lines above all tables, `sheets` further CSV files by name.

    `answer` is what the study found, in a sentence or two; empty is what its first table says. `warnings` stand
    below it; `style` is that of the figures.
    """

    opening: str
    guide: str
    tables: Sequence[Table]
    figures: Figures
    remarks: Sequence[str] = ()
    sheets: Mapping[str, str] = field(default_factory=dict)
    style: str = ""
    answer: str = ""
    warnings: Sequence[str] = ()

    @property
    def found(self) -> str:
        """The answer, or which rows of the first table lead."""
        return self.answer or next(filter(None, map(leading_rows, self.tables)), "")


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
    listed = [*page.warnings, *page.remarks]
    remarks = [*(f"* {line}" for line in listed), ""] if listed else []
    found = [f"**{page.found}**\n"] if page.found else []
    return "\n".join([*found, f"{page.opening}\n", f"{plain}\n", *remarks, *map(to_markdown, page.tables)])


def _html(name: str, study: str, title: str, page: Page, about: Mapping[str, Any]) -> str:
    settings = tag("pre", tag("code", write_yaml(dict(about))))
    return single_page(
        f"{name}: {title}",
        tag("p", f"fedmtl study {study}", class_="kicker"),
        tag("h1", name),
        tag("p", page.found, class_="lede") if page.found else "",
        notices(page.warnings),
        tag("p", page.opening),
        *_figures(page.figures),
        notes(page.remarks),
        tag(
            "section", tag("h2", "Tables"), tag("p", page.guide.replace("`", ""), class_="guide"), *_tables(page.tables)
        ),
        tag("section", tag("h2", "Settings"), tag("details", tag("summary", "What the study was to do"), settings)),
        style=TABLE_STYLE + FIGURE_STYLE + page.style,
        class_="broad",
    )


def _figures(figures: Figures) -> list[Html]:
    """Return the first figures in a row and the others folded below it."""
    drawn = [tag("figure", tag("figcaption", tag("b", words)), picture) for words, picture in figures.values()]
    shown, folded = drawn[:OPEN_FIGURES], drawn[OPEN_FIGURES:]
    parts = [tag("div", *shown, class_="panels lead")] if shown else []
    if folded:
        words = "1 more figure" if len(folded) == 1 else f"{len(folded)} more figures"
        parts.append(tag("details", tag("summary", words), tag("div", *folded, class_="panels inside"), class_="more"))
    return parts


def _tables(tables: Sequence[Table]) -> list[Html]:
    """Return the first table as it is if it is short, and all others folded under their titles."""
    return [
        to_html(table)
        if number == 0 and len(table.rows) <= OPEN_ROWS
        else tag(
            "details", tag("summary", f"{table.title} ({_rows(table)})"), tag("div", to_html(table), class_="inside")
        )
        for number, table in enumerate(tables)
    ]


def _rows(table: Table) -> str:
    return "1 row" if len(table.rows) == 1 else f"{len(table.rows)} rows"
