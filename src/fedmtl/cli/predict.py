"""fedmtl evaluate, fedmtl predict: a finished model is scored, or answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmtl import api
from fedmtl.cli.arguments import Client, Json, Model, Round, onnx_path
from fedmtl.cli.tables import scores_table
from fedmtl.cli.terminal import make_terminal, show, write
from fedmtl.errors import DataError, FedmtlError
from fedmtl.foreign import printable

if TYPE_CHECKING:
    from fedmtl.predict.answers import Prediction
    from fedmtl.predict.text_files import Chunk, Texts
    from fedmtl.tasks.examples import Examples
    from fedmtl.tasks.metrics import Scores
    from fedmtl.tasks.task import Task

WithText = Annotated[bool, typer.Option("--with-text", help="The texts stand in the file of --out too.")]
Row = tuple[str, ...]


def evaluate(
    run: Model,
    task: Annotated[
        str | None, typer.Option(help="Only this task, or only one of its further validation sets, TASK:NAME.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A labelled file with the task's columns, instead of validation.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="The test files of the run's config (source.test), instead of validation.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(help="A column of the file: the scores of each of its values too.", metavar="COLUMN")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write every example's label, answer and probabilities to this csv, tsv, jsonl or parquet."),
    ] = None,
    with_text: WithText = False,
    client: Client = None,
    round: Round = None,
    json_: Json = False,
) -> None:
    """Score a finished run, or an ONNX file in its folder, on its validation data, test files or any labelled file.

    Where all tasks have values that stay at clients, the model of every client is scored.
    """
    if file is not None and task is None:
        raise FedmtlError("--file: needs --task, which says whose columns and labels the file has")
    if file is not None and test:
        raise FedmtlError("--test: scores the files that the config names, and --file another; give one of them")
    if by is not None and file is None:
        raise FedmtlError("--by: groups are those of a file, by one of its columns; give it with --file and --task")
    if with_text and out is None:
        raise FedmtlError("--with-text: is for --out")
    if out is not None:
        from fedmtl.predict.answer_files import TAGGED, answer_ending, check_apart

        if answer_ending(out) in TAGGED:
            raise FedmtlError(f"--out {out}: has no column for a label; write .jsonl, or use `fedmtl predict`")
        check_apart(out, file)
    scored = _Scoring(task, file, by, test, out is not None, with_text)
    source, rounds = (None, {}) if onnx_path(run) else _rounds(run, round)
    for name, (code, model) in _open_models(run, client, round).items():
        scored.add(name, code, model)
    notes = [_round_words(source, rounds)] if source else []
    if test and client is None and not onnx_path(run):
        notes += _note_test_scores(run, round, scored.scores)
    if out is not None:
        from fedmtl.predict.answer_files import write_answers

        notes.append(f"{out}: {write_answers(out, iter([scored.records])):,} answers")
    if json_:
        write(json.dumps(scored.to_json() | ({"rounds": rounds} if source else {})))
    else:
        show(scores_table(scored.scores, scored.main_metrics), notes)


class _Scoring:
    """What one model after the other scores, under the name of the set, and of the client where there are several."""

    def __init__(
        self, task: str | None, file: Path | None, by: str | None, test: bool, wants_records: bool, with_text: bool
    ) -> None:
        self._task, self._file, self._by, self._test = task, file, by, test
        self._wants_records, self._with_text = wants_records, with_text
        self.scores: dict[str, Scores] = {}
        self.main_metrics: dict[str, str] = {}
        self.records: list[dict[str, Any]] = []
        self._warned: list[str] = []

    def add(self, client: str, code: Any, model: Any) -> None:
        """Score a model, which is the client's where one is named; a client without the task is left out."""
        from fedmtl.predict.answers import scored_records
        from fedmtl.tasks.task import owner_of_set

        known = code.known_tasks(model)
        if client and self._task is not None and owner_of_set(self._task) not in known:
            return

        def sink(name: str, task: Task, examples: Examples, outputs: Any) -> None:
            if self._by is not None and name != task.name:
                # A group's examples are among those of the whole file.
                return
            records = scored_records(name, task, examples, outputs, texts=self._with_text)
            self.records += [({"client": client} if client else {}) | record for record in records]

        wanted = sink if self._wants_records else None
        if self._file is not None:
            scores = code.evaluate_file(model, self._task, self._file, self._by, wanted)
        elif self._test:
            scores = code.evaluate_test(model, self._task, wanted)
        else:
            scores = code.evaluate_validation(model, self._task, wanted, self._warn)
        for name, result in scores.items():
            shown = f"{name} at {client}" if client else name
            self.scores[shown] = result
            self.main_metrics[shown] = known[owner_of_set(name)].metric

    def _warn(self, words: str) -> None:
        if words not in self._warned:
            # Every client's model is scored on the same examples.
            self._warned.append(words)
            make_terminal(stderr=True).print(f"warning: {words}", markup=False)

    def to_json(self) -> dict[str, Any]:
        record = {
            name: {"undefined": s.undefined, "examples": s.examples, "marked": s.marked}
            for name, s in self.scores.items()
        }
        return {"metrics": {name: s.metrics for name, s in self.scores.items()}, "tasks": record}


def _open_models(run: str, client: str | None, round: str | None) -> dict[str, tuple[Any, Any]]:
    """The model, or where it answers nothing without a client's values, every client's by the client's name."""
    if onnx_path(run, client, round):
        return {"": _open_model(run, client, round)}
    found = api.Run.open(run)
    from fedmtl.predict.rounds import saved_clients
    from fedmtl.predict.run import ValuesAtClients

    try:
        return {"": _open_model(run, client, round)}
    except ValuesAtClients:
        clients = saved_clients(found.folder)
        if client is not None or not clients:
            raise
    return {name: _open_model(run, name, round) for name in clients}


def _rounds(run: str, round: str | None) -> tuple[str | None, dict[str, int]]:
    """What chose the round, and the round that each task's model is of; nothing where it is the last as always."""
    from fedmtl.predict.rounds import kept_round
    from fedmtl.runs.log import read_events
    from fedmtl.runs.summary import BEST, task_rounds

    found = api.Run.open(run)
    if round is not None:
        return f"--round {round}", task_rounds(read_events(found.folder), round, found.name)
    if kept_round(found.folder) == BEST:
        return "training.keep: best", task_rounds(read_events(found.folder), BEST, found.name)
    return None, {}


def _note_test_scores(run: str, round: str | None, scores: dict[str, Scores]) -> list[str]:
    """Leave the scores in the run's folder, where an export's card finds them; a line that says so."""
    from fedmtl.config.file import load_config
    from fedmtl.runs.summary import TestScore, note_test_scores

    folder = api.Run.open(run).folder
    _, rounds = _rounds(run, round or load_config(folder.config).training.keep)
    # Of values that stay at clients every client has its own scores, and no export has them.
    found = [
        TestScore(set=name, round=rounds[name], examples=score.examples, metrics=score.metrics)
        for name, score in scores.items()
        if name in rounds
    ]
    if not found:
        return []
    try:
        note_test_scores(folder, found)
    except OSError as error:
        return [f"{folder.test_scores}: cannot be written ({error.strerror}), so cards will not have these scores"]
    return [f"{folder.test_scores}: the cards of exports will have these scores"]


def _round_words(source: str, rounds: dict[str, int]) -> str:
    if len(set(rounds.values())) == 1:
        return f"the model after round {next(iter(rounds.values()))} ({source})"
    each = ", ".join(f"{task} after round {at}" for task, at in rounds.items())
    return f"the model of {each} ({source})"


def predict(
    run: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="One text, or two for the tasks on pairs; - or none reads lines from stdin."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task; otherwise every head that fits.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A csv, tsv, jsonl or parquet file, plain or gzipped, or lines of one text or two separated by a tab;"
            " - is stdin."
        ),
    ] = None,
    text_columns: Annotated[
        str | None,
        typer.Option(
            "--text-columns",
            help="The column of the text, or the two of a pair, by name or by number from 1; otherwise the tasks'.",
            metavar="A[,B]",
        ),
    ] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The first line of the csv or tsv file is a row; give numbers.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the answers to this csv, tsv, jsonl or parquet file, or tags of words to a .conll; all but"
            " parquet may end in .gz."
        ),
    ] = None,
    with_text: WithText = False,
    client: Client = None,
    round: Round = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per text.")] = False,
) -> None:
    """Answer with every head in one pass: one text, a table, or lines of a pipe as they come."""
    from fedmtl.predict.answer_files import TAGGED, answer_ending, check_apart, write_answers, write_tags
    from fedmtl.predict.text_files import STDIN, given_texts, open_texts

    if file is not None and texts:
        raise DataError("predict: found texts and --file; give one of them")
    columns = text_columns.split(",") if text_columns else []
    _check_options(out, with_text, json_)
    is_given = bool(texts) and texts != [STDIN]
    if is_given and (columns or no_header):
        raise FedmtlError("--text-columns, --no-header: are for a file or a pipe, and a text was given")
    if no_header and not all(column.isdigit() for column in columns or ["a"]):
        raise FedmtlError("--no-header: columns have numbers then; write --text-columns 1, or 1,2 for a pair")
    path = None if file is None or str(file) == STDIN else file
    if out is not None:
        check_apart(out, path)
    rows = _given(texts or []) if is_given else []
    code, model = _open_model(run, client, round)
    if is_given:
        opened = given_texts(rows)
    else:
        opened = open_texts(path, columns, code.known_tasks(model, task), header=not no_header)
    names = code.answerable(model, len(opened.names), task)
    answered = ((chunk, code.predict_texts(model, chunk.rows, names)) for chunk in opened.chunks)
    if out is not None and answer_ending(out) in TAGGED:
        write(f"{out}: {write_tags(out, (answers for _, answers in answered)):,} answers")
        return
    if out is not None:
        records = (_records(opened, chunk, answers, with_text) for chunk, answers in answered)
        write(f"{out}: {write_answers(out, records):,} answers")
        return
    for chunk, answers in answered:
        lines = [_line(row, given, is_given, json_) for row, given in zip(chunk.rows, answers, strict=True)]
        write("\n".join(lines), is_printable=is_given and not json_)


def _check_options(out: Path | None, with_text: bool, json_: bool) -> None:
    if out is None:
        if with_text:
            raise FedmtlError("--with-text: is for --out; what is printed has the texts in it")
        return
    from fedmtl.predict.answer_files import answer_ending

    answer_ending(out)
    if json_:
        raise FedmtlError(f"--json: prints, and --out {out} writes; give one of them (a name in .jsonl writes JSON)")


def _open_model(run: str, client: str | None, round: str | None) -> tuple[Any, Any]:
    """The code that answers, of a run or of an ONNX file, and the model that it opened."""
    onnx = onnx_path(run, client, round)
    if onnx:
        from fedmtl.predict import onnx as from_onnx

        return from_onnx, from_onnx.open_onnx(onnx)
    found = api.Run.open(run)
    from fedmtl.predict import run as from_run

    return from_run, from_run.load_run(found.folder, client, round, values_only=True)


def _records(opened: Texts, chunk: Chunk, answers: list[list[Prediction]], with_text: bool) -> list[dict[str, Any]]:
    from fedmtl.predict.answer_files import answer_columns
    from fedmtl.tasks.words import plain_text

    records = []
    for stood, known, row, given in zip(chunk.numbers, chunk.ids, chunk.rows, answers, strict=True):
        record: dict[str, Any] = {opened.unit: stood} | ({"id": known} if opened.has_ids else {})
        record |= dict(zip(opened.names, map(plain_text, row), strict=True)) if with_text else {}
        records.append(record | answer_columns(given, record))
    return records


def _line(row: Row, answers: list[Prediction], is_given: bool, is_json: bool) -> str:
    from fedmtl.tasks.words import plain_text

    row = tuple(map(plain_text, row))
    if is_json:
        return json.dumps({"texts": list(row), "predictions": [answer.to_json() for answer in answers]})
    shown = [line for answer in answers for line in _shown(answer, row[0], is_coloured=is_given)]
    if is_given:
        return "\n".join(shown)
    # A table's text may have them, and here they end a text and a line; half a character cannot be printed.
    texts = (text.replace("\t", "\\t").replace("\n", "\\n").encode("utf-8", "replace").decode() for text in row)
    return "\t".join([*texts, *shown])


def _shown(answer: Prediction, text: str, *, is_coloured: bool) -> list[str]:
    # Task and label are the model's words, which may be anybody's; the text beside them is the user's.
    task, colours = printable(answer.task), is_coloured and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return [f"{task}: {line}" for line in answer.answer.lines(text, coloured=colours)]


def _given(texts: list[str]) -> list[Row]:
    if len(texts) > 2:
        raise DataError(f"predict: takes one text, or two for a pair; {len(texts)} given. Use --file for many")
    if not all(map(str.strip, texts)):
        raise DataError("predict: a text is empty; write some words between the quotes")
    return [tuple(texts)]
