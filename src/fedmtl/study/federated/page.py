"""The files of a study of federated against centralized: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from fedmtl.study.federated.asked import Asked
from fedmtl.study.federated.cells import lines
from fedmtl.study.federated.figures import STYLE, make_figures
from fedmtl.study.federated.gains import clients_csv, gain_table
from fedmtl.study.federated.similarity import ends_table, printed_table
from fedmtl.study.federated.tables import Known, compared_table, rates_table
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.page import Content, write_pages
from fedmtl.study.standing import failure_words, standing_words
from fedmtl.study.tables import Table

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
    content = Content(
        command="fedmtl study federated",
        title="federated and centralized",
        opening=f"{_asked(about)} {standing_words(standing)}",
        guide=CHOOSING if asked.choose else GUIDE,
        said=failure_words(standing),
        tables=make_tables(asked, known),
        pictures=make_figures(known),
        about=about,
        sheets={"cells": cells_csv(known), "clients": clients_csv(known)},
        style=STYLE,
    )
    write_pages(folder, content)


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
