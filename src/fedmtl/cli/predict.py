"""fedmtl predict"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.tables import number
from fedmtl.errors import DataError
from fedmtl.runs import find_run


def predict(
    run: Annotated[str, typer.Argument(help="A run's name or folder.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="One text, or two for the tasks on pairs; none reads lines from stdin."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task; otherwise every head that fits.")] = None,
    file: Annotated[Path | None, typer.Option(help="Lines of one text, or two separated by a tab.")] = None,
    client: Annotated[str | None, typer.Option(help="With the values this client kept for itself.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per text.")] = False,
) -> None:
    """Answer with every head in one pass."""
    if texts and len(texts) > 2:
        raise DataError(f"predict: takes one text, or two for a pair; {len(texts)} given. Use --file for many")
    rows = [tuple(texts)] if texts else _rows(_lines(file))
    found = find_run(run)
    from fedmtl.experiment.inference import answerable, load_run, predict_texts

    loaded = load_run(found, client)
    names = answerable(loaded, len(rows[0]), task)
    for row, answers in zip(rows, predict_texts(loaded, rows, names), strict=True):
        if json_:
            print(json.dumps({"texts": list(row), "predictions": [answer.to_json() for answer in answers]}))
            continue
        shown = [
            f"{a.task}: {a.label} ({number(a.probabilities[a.label])})" if a.label else f"{a.task}: {number(a.score)}"
            for a in answers
        ]
        print("\n".join(shown) if len(rows) == 1 else "\t".join([*row, *shown]))


def _lines(file: Path | None) -> Iterable[str]:
    if file is None:
        return sys.stdin
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); give a UTF-8 text file") from error


def _rows(lines: Iterable[str]) -> list[tuple[str, ...]]:
    rows = [tuple(line.rstrip("\r\n").split("\t")) for line in lines if line.strip()]
    if not rows:
        raise DataError("predict: no text given; write it after the run's name, or give --file, or pipe lines in")
    for number_, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]) or len(row) > 2:
            raise DataError(
                f"predict: line {number_} has {len(row)} texts, line 1 has {len(rows[0])}; give one or two a line"
            )
    return rows
