"""The files of a study of federated against centralized: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping
from typing import Any

from fedmtl.config.yaml_text import write_yaml
from fedmtl.report.markup import notes, tag
from fedmtl.runs import write_atomic
from fedmtl.study.federated.asked import Asked
from fedmtl.study.federated.cells import lines
from fedmtl.study.federated.figures import STYLE, make_figures
from fedmtl.study.federated.gains import clients_csv, gain_table
from fedmtl.study.federated.similarity import ends_table, printed_table
from fedmtl.study.federated.tables import Known, compared_table, rates_table
from fedmtl.study.figures import FIGURE_STYLE, write_svg
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.page import TABLE_STYLE, study_page
from fedmtl.study.standing import failure_words, standing_words
from fedmtl.study.tables import Table, to_csv, to_html, to_markdown

GUIDE = (
    "Scores are of the dev sets, after the last round. Every mode trains on the same examples, as often: rounds times"
    " local epochs. The points are a base (all samples, iid, three clients per task) and lines through it, not their"
    " whole product; all five modes stand at each. Distances are in points, hundredths of a score, to centralized"
    " multi-task training with the same seed. Deviations are over seeds. Each mode may have a learning rate of its own,"
    " chosen on a split cut from train (`--choose`)."
)
CHOOSING = (
    "Every mode with every learning rate, on a tenth cut from train, at the base point: all samples, iid, three clients"
    " per task. Nothing here has seen a dev set, but for --quick, whose texts are made up."
)


def write_study(folder: StudyFolder, asked: Asked, about: Mapping[str, Any], known: Known, standing: Standing) -> None:
    """Everything that can be shown of the cells that are finished."""
    tables = make_tables(asked, known)
    for table in tables:
        write_atomic(folder.path / f"{table.name}.csv", to_csv(table).encode())
    write_atomic(folder.path / "cells.csv", cells_csv(known).encode())
    write_atomic(folder.path / "clients.csv", clients_csv(known).encode())
    pictures = make_figures(known)
    for name, (_, picture) in pictures.items():
        write_svg(folder.figures / f"{name}.svg", picture, STYLE)
    opening = f"{_asked(about)} {standing_words(standing)}"
    guide, failures = CHOOSING if asked.choose else GUIDE, failure_words(standing)
    parts = [f"{opening}\n", "\n".join(textwrap.wrap(guide, 120)) + "\n", *map(to_markdown, tables)]
    write_atomic(folder.markdown, "\n".join([*parts, *(f"* {line}" for line in failures)]).encode())
    figures = (tag("figure", tag("figcaption", tag("b", words)), picture) for words, picture in pictures.values())
    page = study_page(
        f"{folder.path.name}: federated and centralized",
        tag("p", "fedmtl study federated", class_="kicker"),
        tag("h1", folder.path.name),
        tag("p", opening, class_="lede"),
        notes(failures),
        tag("p", guide.replace("`", ""), class_="guide"),
        *(tag("section", to_html(table)) for table in tables),
        tag("section", tag("h2", "Figures"), tag("div", *figures, class_="panels")) if pictures else "",
        tag("section", tag("h2", "What was asked"), tag("pre", tag("code", write_yaml(dict(about))))),
        style=TABLE_STYLE + FIGURE_STYLE + STYLE,
        class_="broad",
    )
    write_atomic(folder.page, page.encode())


def make_tables(asked: Asked, known: Known) -> list[Table]:
    """Those that have a row, in the order of their numbers."""
    if asked.choose:
        return [rates_table(known)]
    compared = {number: compared_table(number, points, known) for number, points in lines(asked).items()}
    numbered = {**compared, 5: gain_table(known), 7: printed_table(known), 8: ends_table(known)}
    return [table for _, table in sorted(numbered.items()) if table is not None]


def _asked(about: Mapping[str, Any]) -> str:
    data = "embedded, synthetic texts in miniature" if about["quick"] else about["data"]
    return f"Encoder {about['encoder']} on {data}; seeds {', '.join(map(str, about['seeds']))}."


def cells_csv(known: Known) -> str:
    """One row for every finished cell, with all metrics of its tasks; where clients are alone, of all their answers."""
    cells = {one.cell: one for own in known.results.values() for one in own.values() if one is not None}
    named = {t: list(dict.fromkeys(m for c in cells.values() for m in c.metrics.get(t, {}))) for t in known.tasks}
    scored = [(task, metric) for task, own in named.items() for metric in own]
    costs = ("learning_rate", "examples", "steps", "steps_in_a_row", "seconds", "computed", "cells_at_once")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = [f"{task}_{part}" for task in known.tasks for part in ("score", "best", "best_round")]
    writer.writerow(["cell", *head, *(f"{task}_{metric}" for task, metric in scored), *costs])
    for name, cell in cells.items():
        ends = [part for task in known.tasks for part in (cell.score(task), *(cell.best(task) or (None, None))[::-1])]
        values = [cell.metrics.get(task, {}).get(metric) for task, metric in scored]
        writer.writerow([name, *ends, *values, *(getattr(cell.budget, cost) for cost in costs)])
    return text.getvalue()
