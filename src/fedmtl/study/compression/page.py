"""The files of a study of compression: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmtl.study.compression.base import Base
from fedmtl.study.compression.figures import STYLE, make_figures
from fedmtl.study.compression.results import Results
from fedmtl.study.compression.sizes import Sizes
from fedmtl.study.compression.tables import Known, make_table
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.page import Content, write_pages
from fedmtl.study.standing import failure_words, standing_words

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
    base = shown.base
    known = Known(base.setups, base.metrics, base.shapes, results)
    content = Content(
        command="fedmtl study compression",
        title="compression",
        opening=f"{_asked(shown)} {standing_words(standing)}",
        guide=GUIDE,
        said=[*([] if base.has_augmentation else [NO_AUGMENTATION]), *failure_words(standing)],
        tables=[make_table(number, names, known, sizes) for number, names in sorted(shown.rows.items())],
        pictures=make_figures(shown.rows, known, sizes),
        about=shown.about,
        sheets={"cells": cells_csv(results, base.metrics)},
        style=STYLE,
    )
    write_pages(shown.folder, content)


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
