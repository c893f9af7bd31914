"""The files of a study of compression: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmtl.config.yaml_text import write_yaml
from fedmtl.report.markup import notes, tag
from fedmtl.runs import write_atomic
from fedmtl.study.compression.base import Base
from fedmtl.study.compression.figures import STYLE, make_figures
from fedmtl.study.compression.results import Results
from fedmtl.study.compression.sizes import Sizes
from fedmtl.study.compression.tables import Known, make_table
from fedmtl.study.figures import FIGURE_STYLE, write_svg
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.page import TABLE_STYLE, study_page
from fedmtl.study.standing import failure_words, standing_words
from fedmtl.study.tables import to_csv, to_html, to_markdown

GUIDE = (
    "Scores are of the dev sets, after the last pass. A `%` is the share of the teacher's score that is left, with the"
    " teacher of the same seed; `mean of %` is its mean over tasks. A task is named as no better than a constant where"
    " the model's score equals the majority class's, or it gives one answer to all. Deviations are over seeds. The"
    " numbers of the slides and of the paper are their own; ratios are recomputed from them."
)
NO_AUGMENTATION = "No --augment was given: students that learn on altered copies of the texts are left out."


@dataclass(frozen=True)
class Shown:
    """What is shown of a study: its folder, what was asked, its base and the rows of each table."""

    folder: StudyFolder
    about: Mapping[str, Any]
    base: Base
    rows: Mapping[int, list[str]]


def write_study(shown: Shown, results: Results, standing: Standing, sizes: Sizes) -> None:
    """Everything that can be shown of the cells that are finished and the models that are measured."""
    folder, base = shown.folder, shown.base
    known = Known(base.setups, base.metrics, base.shapes, results)
    tables = [make_table(number, names, known, sizes) for number, names in sorted(shown.rows.items())]
    for table in tables:
        write_atomic(folder.path / f"{table.name}.csv", to_csv(table).encode())
    write_atomic(folder.path / "cells.csv", cells_csv(results, base.metrics).encode())
    pictures = make_figures(shown.rows, known, sizes)
    for name, (_, picture) in pictures.items():
        write_svg(folder.figures / f"{name}.svg", picture, STYLE)
    opening = f"{_asked(shown)} {standing_words(standing)}"
    said = [*([] if base.has_augmentation else [NO_AUGMENTATION]), *failure_words(standing)]
    plain = "\n".join(textwrap.wrap(GUIDE, 120))
    parts = [f"{opening}\n", f"{plain}\n", *(f"* {line}" for line in said), "", *map(to_markdown, tables)]
    write_atomic(folder.markdown, "\n".join(parts).encode())
    figures = (tag("figure", tag("figcaption", tag("b", words)), picture) for words, picture in pictures.values())
    page = study_page(
        f"{folder.path.name}: compression",
        tag("p", "fedmtl study compression", class_="kicker"),
        tag("h1", folder.path.name),
        tag("p", opening, class_="lede"),
        notes(said),
        tag("p", GUIDE.replace("`", ""), class_="guide"),
        *(tag("section", to_html(table)) for table in tables),
        tag("section", tag("h2", "Figures"), tag("div", *figures, class_="panels")) if pictures else "",
        tag("section", tag("h2", "What was asked"), tag("pre", tag("code", write_yaml(dict(shown.about))))),
        style=TABLE_STYLE + FIGURE_STYLE + STYLE,
        class_="broad",
    )
    write_atomic(folder.page, page.encode())


def _asked(shown: Shown) -> str:
    about, shape = shown.about, shown.base.shapes.teacher
    data = "embedded, synthetic texts in miniature" if about["quick"] else about["data"] or "its own data"
    teacher = f"run {about['teacher']}" if about["teacher"] else f"encoder {about['encoder']}"
    return f"Teacher: {teacher} ({shape}) on {data}; seeds {', '.join(map(str, about['seeds']))}."


def cells_csv(results: Results, metrics: Mapping[str, str]) -> str:
    """One row for every finished cell, with all metrics of its tasks."""
    cells = [cell for own in results.values() for cell in own.values() if cell is not None]
    named = {task: list(dict.fromkeys(m for cell in cells for m in cell.metrics.get(task, {}))) for task in metrics}
    scored = [(task, metric) for task, own in named.items() for metric in own]
    costs = ("parameters", "model_bytes", "examples", "copies", "seconds", "device", "cells_at_once")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", *(f"{task}_{metric}" for task, metric in scored), "marked", *costs])
    for cell in cells:
        values = [cell.metrics.get(task, {}).get(metric) for task, metric in scored]
        writer.writerow([cell.cell, *values, " ".join(cell.marked), *(getattr(cell, name) for name in costs)])
    return text.getvalue()
