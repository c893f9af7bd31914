"""The files of a study of scaling: CSV, markdown, figures and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from fedmtl.report.formats import count
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Standing
from fedmtl.study.page import Content, write_pages
from fedmtl.study.scaling.asked import Asked, encoder_label
from fedmtl.study.scaling.cells import scored_file
from fedmtl.study.scaling.figures import STYLE, make_figures
from fedmtl.study.scaling.results import Result, Results
from fedmtl.study.scaling.tables import make_tables
from fedmtl.study.scaling.verdicts import Known, collapse, fate
from fedmtl.study.standing import failure_words, standing_words

GUIDE = (
    "The same examples are divided among 1, 2, 4, ... clients, which train and are averaged; all else stays as it is."
    " Every run ends after a number of rounds that was fixed before, and no score chooses anything. Chance is what"
    " always giving the most frequent label scores; at chance is within 5 points of it. Deviations are over seeds,"
    " which also draw the examples and the rows that are scored."
)
_COSTS = (
    "chance", "num_train", "num_scored", "steps", "round_bytes", "train_seconds", "evaluate_seconds", "device",
    "precision", "cells_at_once",
)  # fmt: skip


def write_study(folder: StudyFolder, about: Mapping[str, Any], known: Known, standing: Standing) -> None:
    """Everything that can be shown of the cells that are finished."""
    content = Content(
        command="fedmtl study scaling",
        title="scaling",
        opening=f"{_asked(known.asked)} {standing_words(standing)}",
        guide=GUIDE,
        said=[*_collapses(known), *_scored(known), *failure_words(standing)],
        tables=make_tables(known),
        pictures=make_figures(known),
        about=about,
        sheets={"cells": cells_csv(known), "curves": curves_csv(known.results)},
        style=STYLE,
        pictures_first=True,
    )
    write_pages(folder, content)


def _asked(asked: Asked) -> str:
    training = asked.config["training"]
    encoders = ", ".join(map(encoder_label, asked.encoders))
    data = "embedded, synthetic texts in miniature" if asked.is_quick else ", ".join(asked.tasks)
    amount = "all examples" if asked.examples is None else f"{count(asked.examples)} examples"
    seeds = ", ".join(map(str, asked.seeds))
    rates = "".join(f" ({rate:g} for {pattern})" for pattern, rate in asked.rates)
    return (
        f"{encoders} on {data}: {amount}, {asked.partition}, {training['optimizer']} at"
        f" {training['learning_rate']:g}{rates}, {training['local_epochs']} local epochs;"
        f" preset {asked.preset}, seeds {seeds}."
    )


def _collapses(known: Known) -> list[str]:
    named = dict.fromkeys((setup.encoder, setup.task) for setup in known.results)
    found = ((f"{encoder} on {task}", collapse(known, encoder, task)) for encoder, task in named)
    return [f"{who}: {what.words}." for who, what in found if what is not None]


def _scored(known: Known) -> list[str]:
    """What each task is scored on, from what its runs said."""
    lines = []
    for task in known.asked.tasks:
        cells = (cell for setup, own in known.results.items() if setup.task == task for cell in own.values() if cell)
        first = next(cells, None)
        if first is None:
            continue
        place = scored_file(known.asked, task)
        where = f"of {place.name}" if place else "cut from train" if first.is_cut else "of the validation split"
        lines.append(
            f"{task}: trained on {count(first.num_train)} examples, scored on {count(first.num_scored)} rows {where}."
        )
    return lines


def cells_csv(known: Known) -> str:
    """One row for every finished cell, with all that was measured of it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["cell", "encoder", "task", "clients", "seed", "accuracy", "at_chance", "rounds_to_target", "last_accuracy"]
    writer.writerow([*head, "fewest_examples", "most_examples", *_COSTS])
    for setup, own in known.results.items():
        reached, at = known.reached(setup), known.asked.rounds[setup.task]
        for seed, cell in own.items():
            if cell is not None:
                who = [cell.cell, setup.encoder, setup.task, setup.clients, seed]
                scores = [cell.curve[at], fate(cell, at), reached.get(seed, ""), cell.curve[max(cell.curve)]]
                writer.writerow([*who, *scores, *cell.examples, *_costs(cell)])
    return text.getvalue()


def _costs(cell: Result) -> list[object]:
    return [getattr(cell, name) for name in _COSTS]


def curves_csv(results: Results) -> str:
    """Every evaluation of every finished cell: what figure 3 is drawn from."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["encoder", "task", "clients", "seed", "round", "accuracy"])
    for setup, own in results.items():
        for seed, cell in own.items():
            for number, accuracy in sorted(cell.curve.items()) if cell else ():
                writer.writerow([setup.encoder, setup.task, setup.clients, seed, number, f"{accuracy:.6g}"])
    return text.getvalue()
