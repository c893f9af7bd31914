"""fedmtl evaluate, fedmtl predict: a finished model is scored, or answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl import api
from fedmtl.cli.arguments import Client, Json, Model, Round, onnx_path
from fedmtl.cli.tables import number, scores_table
from fedmtl.cli.terminal import show, write
from fedmtl.errors import DataError, FedmtlError
from fedmtl.foreign import printable

if TYPE_CHECKING:
    from fedmtl.predict.answers import Prediction
    from fedmtl.tasks.metrics import Scores

    # Every task's scores, and its main metric.
    Scored = tuple[dict[str, Scores], dict[str, str]]

NOTHING = "predict: no text given; write it after the run's name, or give --file, or pipe lines in"
Row = tuple[str, ...]


def evaluate(
    run: Model,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A labelled file with the task's columns, instead of validation.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="A column of the file: the scores of each of its values too.", metavar="COLUMN")
    ] = None,
    client: Client = None,
    round: Round = None,
    json_: Json = False,
) -> None:
    """Score a finished run, or an ONNX file in its folder, on its validation data or on any labelled file."""
    if file is not None and task is None:
        raise FedmtlError("--file: needs --task, which says whose columns and labels the file has")
    if by is not None and file is None:
        raise FedmtlError("--by: groups are those of a file, by one of its columns; give it with --file and --task")
    onnx = onnx_path(run, client, round)
    if onnx:
        scores, main_metrics = _score_onnx(onnx, task, file, by)
    else:
        scores, main_metrics = _scored(api.Run.open(run), task, file, client=client, round=round, by=by)
    if json_:
        record = {
            name: {"undefined": s.undefined, "examples": s.examples, "marked": s.marked} for name, s in scores.items()
        }
        write(json.dumps({"metrics": {name: s.metrics for name, s in scores.items()}, "tasks": record}))
        return
    show(scores_table(scores, main_metrics))


def _scored(found: api.Run, task: str | None, file: Path | None, **how: str | None) -> Scored:
    from fedmtl.tasks.task import owner_of_set

    scores = found.evaluate(task, file, **how)
    tasks = found.model(how["client"], how["round"]).saved.tasks
    return scores, {name: tasks[owner_of_set(name)].metric for name in scores}


def _score_onnx(onnx: Path, task: str | None, file: Path | None, by: str | None) -> Scored:
    from fedmtl.predict.onnx import evaluate_file, evaluate_validation, open_onnx
    from fedmtl.tasks.task import owner_of_set

    model = open_onnx(onnx)
    scores = evaluate_file(model, task, file, by) if task and file else evaluate_validation(model, task)
    return scores, {name: model.tasks[owner_of_set(name)].metric for name in scores}


def predict(
    run: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="One text, or two for the tasks on pairs; none reads lines from stdin."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task; otherwise every head that fits.")] = None,
    file: Annotated[Path | None, typer.Option(help="Lines of one text, or two separated by a tab.")] = None,
    client: Client = None,
    round: Round = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per text.")] = False,
) -> None:
    """Answer with every head in one pass."""
    onnx = onnx_path(run, client, round)
    found = None if onnx else api.Run.open(run)
    rows = _given(texts, file) if texts else _rows(_lines(file), str(file or "stdin"))
    answered = found.predict(rows, task, client, round) if found else _ask_onnx(onnx or Path(run), rows, task)
    for row, answers in zip(rows, answered, strict=True):
        if json_:
            line = json.dumps({"texts": list(row), "predictions": [answer.to_json() for answer in answers]})
        else:
            shown = list(map(_shown, answers))
            line = "\n".join(shown) if texts else "\t".join([*row, *shown])
        write(line)


def _ask_onnx(file: Path, rows: list[Row], task: str | None) -> list[list[Prediction]]:
    from fedmtl.predict.onnx import answerable, open_onnx, predict_texts

    model = open_onnx(file)
    return predict_texts(model, rows, answerable(model, len(rows[0]), task))


def _shown(answer: Prediction) -> str:
    # Task and label are the model's words, which may be anybody's; the text beside them is the user's.
    task = printable(answer.task)
    if answer.label is None:
        return f"{task}: {number(answer.score)}"
    return f"{task}: {printable(answer.label)} ({number(answer.probabilities[answer.label])})"


def _given(texts: list[str], file: Path | None) -> list[Row]:
    if file is not None:
        raise DataError("predict: found texts and --file; give one of them")
    if len(texts) > 2:
        raise DataError(f"predict: takes one text, or two for a pair; {len(texts)} given. Use --file for many")
    if not all(map(str.strip, texts)):
        raise DataError("predict: a text is empty; write some words between the quotes")
    return [tuple(texts)]


def _lines(file: Path | None) -> Iterable[str]:
    if file is None:
        if sys.stdin.isatty():
            raise DataError(NOTHING)
        return sys.stdin
    try:
        # Not splitlines: it also cuts at signs that may stand inside a text.
        return file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); give a text file") from error


def _rows(lines: Iterable[str], where: str) -> list[Row]:
    """The lines that are not blank, as one or two texts each; all have as many as the first."""
    rows: list[Row] = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = tuple(line.rstrip("\r\n").split("\t"))
        if len(row) > 2:
            raise DataError(
                f"{where}, line {line_number}: has {len(row)} texts; give one a line, or two with a tab between"
            )
        if rows and len(row) != len(rows[0]):
            raise DataError(
                f"{where}, line {line_number}: has {len(row)} texts, the first line {len(rows[0])}; give as many"
            )
        if not all(map(str.strip, row)):
            raise DataError(f"{where}, line {line_number}: a text is empty; fill it or remove the line")
        rows.append(row)
    if not rows:
        raise DataError(NOTHING)
    return rows
