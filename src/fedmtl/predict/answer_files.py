"""Answers as a table: one row for each text, in a csv, tsv, jsonl or parquet file; without torch.

A file appears when all of it is written, readable for its owner alone. It names texts by their line and `id`; the texts
stand in it where the user wants them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedmtl.errors import DataError, needs_extra
from fedmtl.predict.answers import Prediction

ENDINGS = (".csv.gz", ".csv", ".tsv.gz", ".tsv", ".jsonl.gz", ".jsonl", ".parquet")
# The tags of words, in columns.
TAGGED = (".conll.gz", ".conll")
Records = Iterable[Mapping[str, Any]]


def answer_ending(path: Path) -> str:
    """How the file's name ends, which says what is written; any other name is a DataError."""
    known = (*ENDINGS, *TAGGED)
    ending = next((ending for ending in known if path.name.lower().endswith(ending)), None)
    if ending is None:
        raise DataError(f"--out {path}: the name does not say what to write; end it in one of {', '.join(known)}")
    return ending


def check_apart(out: Path, read: Path | None) -> None:
    """Raise a DataError where the file to write is the one that is read, by whichever name or link."""
    if read is None:
        return
    with suppress(OSError):
        if out.resolve() == read.resolve() or out.samefile(read):
            raise DataError(f"--out {out}: is the file that is read; name another")


def answer_columns(answers: Sequence[Prediction], others: Iterable[str] = ()) -> dict[str, Any]:
    """The answers to one text as columns: `TASK` is the label or the score, `TASK.LABEL` a label's probability.

    A column that is called as one of the others, such as `line`, gets `_answer` behind its name.
    """
    taken = set(others)
    columns: dict[str, Any] = {}
    for answer in answers:
        cells = answer.answer.cells()
        columns |= {f"{answer.task}.{name}" if name else answer.task: value for name, value in cells.items()}
    return {_free(name, taken): value for name, value in columns.items()}


def _free(name: str, taken: Container[str]) -> str:
    while name in taken:
        name += "_answer"
    return name


def write_tags(path: Path, chunks: Iterable[Iterable[Sequence[Prediction]]]) -> int:
    """Write every text as lines of a word and its tag by each task, a blank line behind; return how many there were."""
    count = 0
    with _replaced(path) as temporary, _text_file(temporary, zipped=answer_ending(path).endswith(".gz")) as file:
        for chunk in chunks:
            for answers in chunk:
                tagged = [answer.answer.tagged_words() for answer in answers]
                if None in tagged:
                    task = answers[tagged.index(None)].task
                    raise DataError(f"--out {path}: {task} tags no words; give --task, or write .jsonl")
                for rows in zip(*filter(None, tagged), strict=True):
                    file.write("\t".join([rows[0][0], *(tag for _, tag in rows)]) + "\n")
                file.write("\n")
                count += 1
    return count


def write_answers(path: Path, chunks: Iterable[Sequence[Mapping[str, Any]]]) -> int:
    """Write chunks of records with the same columns as the ending of the name says; return how many there were."""
    ending = answer_ending(path)
    count = 0
    with _replaced(path) as temporary:
        if ending == ".parquet":
            return _write_parquet(path, temporary, chunks)
        with _text_file(temporary, zipped=ending.endswith(".gz")) as file:
            lines = (
                _json_lines if ending.startswith(".jsonl") else _tab_lines if ending.startswith(".tsv") else _csv_lines
            )
            for chunk in chunks:
                file.writelines(lines(path, chunk, with_header=count == 0))
                count += len(chunk)
    return count


def _json_lines(path: Path, records: Sequence[Mapping[str, Any]], *, with_header: bool) -> Iterator[str]:
    for record in records:
        yield json.dumps(record, ensure_ascii=False) + "\n"


def _csv_lines(path: Path, records: Sequence[Mapping[str, Any]], *, with_header: bool) -> Iterator[str]:
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator="\n")
    if with_header and records:
        writer.writerow(records[0])
    writer.writerows([_cell(value) for value in record.values()] for record in records)
    yield written.getvalue()


def _tab_lines(path: Path, records: Sequence[Mapping[str, Any]], *, with_header: bool) -> Iterator[str]:
    rows = [list(records[0])] if with_header and records else []
    rows += [[_cell(value) for value in record.values()] for record in records]
    for row in rows:
        if any(sign in cell for cell in row for sign in "\t\r\n"):
            raise DataError(
                f"--out {path}: a value has a tab or a line's end in it, which a .tsv cannot hold; write .csv"
            )
        yield "\t".join(row) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else str(_plain(value))


def _plain(value: Any) -> Any:
    """A list as JSON, for files whose columns have one type each."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _write_parquet(path: Path, temporary: Path, chunks: Iterable[Sequence[Mapping[str, Any]]]) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(needs_extra(f"--out {path}", "pyarrow", "parquet") + ", or write .csv") from error
    count, writer = 0, None
    try:
        for chunk in chunks:
            rows = [{name: _plain(value) for name, value in record.items()} for record in chunk]
            table = pyarrow.Table.from_pylist(rows)
            writer = writer or parquet.ParquetWriter(temporary, table.schema)
            writer.write_table(table.cast(writer.schema))
            count += len(chunk)
    finally:
        if writer is not None:
            writer.close()
    return count


@contextmanager
def _text_file(path: Path, *, zipped: bool) -> Iterator[Any]:
    if zipped:
        with gzip.open(path, "wt", encoding="utf-8", errors="backslashreplace", newline="") as packed:
            yield packed
    else:
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield file


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file beside the one that is named, which takes its name at the end; a link there is replaced, not followed."""
    if path.is_dir():
        raise DataError(f"--out {path}: is a folder; name a file in it")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise DataError(
            f"--out {path}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from error
    os.close(descriptor)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()
