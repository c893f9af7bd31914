"""What a study writes: CSV, markdown, figures, and one page that opens offline."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedmtl.config.yaml_text import write_yaml
from fedmtl.report.markup import Html, notes, tag
from fedmtl.report.single_page import TABLE_STYLE, single_page
from fedmtl.runs.folder import write_atomic
from fedmtl.study.figures import FIGURE_STYLE, write_svg
from fedmtl.study.folder import StudyFolder
from fedmtl.study.tables import Table, to_csv, to_html, to_markdown


@dataclass(frozen=True)
class Content:
    """What there is to show: `said` are lines above all tables, `sheets` further CSV files by name.

    `pictures` are figures by file name, each with its title; they stand behind the tables unless `pictures_first`.
    """

    command: str
    title: str
    opening: str
    guide: str
    said: Sequence[str]
    tables: Sequence[Table]
    pictures: Mapping[str, tuple[str, Html]]
    about: Mapping[str, Any]
    sheets: Mapping[str, str] = field(default_factory=dict)
    style: str = ""
    pictures_first: bool = False


def write_pages(folder: StudyFolder, content: Content) -> None:
    """All files of a study, each replaced as a whole."""
    for table in content.tables:
        write_atomic(folder.path / f"{table.name}.csv", to_csv(table).encode())
    for name, text in content.sheets.items():
        write_atomic(folder.path / f"{name}.csv", text.encode())
    for name, (_, picture) in content.pictures.items():
        write_svg(folder.figures / f"{name}.svg", picture, content.style)
    write_atomic(folder.markdown, _markdown(content).encode())
    write_atomic(folder.page, _page(folder.path.name, content).encode())


def _markdown(content: Content) -> str:
    plain = "\n".join(textwrap.wrap(content.guide, 120))
    said = [*(f"* {line}" for line in content.said), ""] if content.said else []
    return "\n".join([f"{content.opening}\n", f"{plain}\n", *said, *map(to_markdown, content.tables)])


def _page(name: str, content: Content) -> str:
    figures = (
        tag("figure", tag("figcaption", tag("b", words)), picture) for words, picture in content.pictures.values()
    )
    pictures = tag("section", tag("h2", "Figures"), tag("div", *figures, class_="panels")) if content.pictures else ""
    tables = [tag("section", to_html(table)) for table in content.tables]
    return single_page(
        f"{name}: {content.title}",
        tag("p", content.command, class_="kicker"),
        tag("h1", name),
        tag("p", content.opening, class_="lede"),
        notes(content.said),
        tag("p", content.guide.replace("`", ""), class_="guide"),
        *([pictures, *tables] if content.pictures_first else [*tables, pictures]),
        tag("section", tag("h2", "What was asked"), tag("pre", tag("code", write_yaml(dict(content.about))))),
        style=TABLE_STYLE + FIGURE_STYLE + content.style,
        class_="broad",
    )
