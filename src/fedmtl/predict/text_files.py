"""Texts to answer, out of tables, plain lines or a pipe, some thousand rows at a time; without torch.

However large a file is, one chunk of it is in memory. A file may be anybody's: whatever is wrong with it is a DataError
that names the line and never quotes a text.
"""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from fedmtl.errors import DataError, FedmtlError, needs_extra
from fedmtl.foreign import excerpt, parse_json
from fedmtl.tasks.sources import (
    ALWAYS_INFLATED,
    LONGEST_FIELD,
    MOST_COLUMNS,
    MOST_INFLATED,
    PARQUET_ROWS,
    SUFFIXES,
    as_text,
    looks_like_names,
    separating,
    separation_advice,
)
from fedmtl.tasks.tag_files import CONLL_ALONE, MOST_WORDS, column_cells, is_comment
from fedmtl.tasks.task import Task
from fedmtl.tasks.words import join_words

Row = tuple[str, ...]
STDIN = "-"
NOTHING = "predict: no text given; write it after the run's name, or give --file, or pipe lines in"
# A chunk is sorted by length and answered as one.
CHUNK_ROWS = 4096
CHUNK_LETTERS = 1 << 24
# What a pipe holds at once.
PIPE_BYTES = 1 << 16
ID = "id"


@dataclass(frozen=True)
class Chunk:
    """Some rows of one or two texts each, with the line or row that each stood in and its `id`, where there is one."""

    rows: list[Row]
    numbers: list[int]
    ids: list[str]


@dataclass(frozen=True)
class Texts:
    """What is to be answered: chunks of rows, all with as many texts as there are names."""

    names: tuple[str, ...]
    unit: Literal["line", "row"]
    has_ids: bool
    chunks: Iterator[Chunk]


@dataclass(frozen=True)
class _Table:
    """The rows of a table as they are read: lists in the header's order, or objects where there is no header."""

    origin: str
    unit: Literal["line", "row"]
    header: list[str]
    rows: Iterator[tuple[int, Any] | None]
    is_objects: bool = False


def open_texts(path: Path | None, columns: Sequence[str], tasks: Mapping[str, Task], *, header: bool = True) -> Texts:
    """Open a table, a file of lines, or stdin where there is no path; `tasks` are those that may answer.

    `columns` names the text columns of a table, or counts them from 1; without any they are those that the tasks read.
    A line of another file is one text, or two with a tab between. A line of stdin is so too; with columns by name it is
    a JSON object, with columns by number it has tabs between them. Without a `header` a table's first line is a row.
    """
    if len(columns) > 2:
        raise DataError(f"--text-columns: found {len(columns)} columns; write one, or two for a pair, such as a,b")
    if path is None:
        return _from_table(_open_pipe(columns), columns, tasks) if columns else _from_lines(_piped(), "stdin")
    name = path.name.lower()
    if name.endswith(".parquet.gz"):
        raise DataError(f"{path}: parquet is compressed inside; unpack the file with `gunzip`")
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    if not path.is_file():
        reason = "it is no file" if path.exists() else "No such file or directory"
        raise DataError(f"{path}: cannot be read ({reason}); give a text file")
    if suffix is None and name.endswith(CONLL_ALONE):
        return Texts(("text",), "line", False, _chunks(_sentences(path, columns)))
    if suffix is None:
        if columns:
            raise DataError(
                f"--text-columns: {path} is read as lines of one text or two; name a file that ends in"
                f" {', '.join(SUFFIXES)}"
            )
        return _from_lines(_read_lines(path), str(path))
    if suffix == ".parquet":
        return _from_table(_open_parquet(path), columns, tasks)
    if suffix.startswith(".jsonl"):
        return _from_table(_open_jsonl(str(path), _read_lines(path)), columns, tasks)
    # Numbers of columns are no names: then the tasks' columns in the header say what separates it.
    wanted = [*([tuple(columns)] if columns else []), *(task.text for task in tasks.values())]
    table = _open_rows(path, suffix, wanted, header=header)
    if suffix.startswith(".tsv") and not columns and len(table.header) <= 2 and not looks_like_names(table.header):
        # Two texts with a tab between are lines of texts, whatever the file is called.
        return _from_lines(_read_lines(path), str(path))
    return _from_table(table, columns, tasks)


def given_texts(rows: list[Row]) -> Texts:
    """Texts that are at hand."""
    names = ("text",) if len(rows[0]) == 1 else ("text1", "text2")
    return Texts(names, "line", False, iter([Chunk(rows, list(range(1, len(rows) + 1)), [""] * len(rows))]))


def _from_lines(lines: Iterable[str], origin: str) -> Texts:
    """Lines that are not blank, as one or two texts each; all have as many as the first."""
    numbered = _split_lines(lines, origin)
    first = next(numbered, None)
    if first is None:
        raise DataError(NOTHING)
    names = ("text",) if len(first[1]) == 1 else ("text1", "text2")

    def again() -> Iterator[tuple[int, Row, str] | None]:
        yield first
        for read in numbered:
            if read is not None and len(read[1]) != len(names):
                raise DataError(
                    f"{origin}, line {read[0]}: has {len(read[1])} texts, the first line {len(names)}; give as many"
                )
            yield read

    return Texts(names, "line", False, _chunks(again()))


def _sentences(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row, str] | None]:
    """The sentences of a CoNLL file, with or without tags; words are in the first column, or the one by number."""
    if len(columns) > 1 or not all(column.isdigit() and int(column) for column in columns):
        raise DataError(f"--text-columns: {path} has words and tags in columns; write the number of the words', from 1")
    column, width, begin = int(columns[0]) if columns else 1, 0, 0
    words: list[str] = []
    for number, line in enumerate(chain(_read_lines(path), [""]), start=1):
        cells = column_cells(line.rstrip("\r\n"))
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield begin, (join_words(words),), ""
            words = []
        # Without tags a line of one column is a word, however it begins.
        elif (len(cells) == 1 and width < 2) or not is_comment(line, cells, width):
            width = width or len(cells)
            begin = begin if words else number
            if len(cells) < column or not cells[column - 1].strip():
                raise DataError(
                    f"{path}, line {number}: has no word in column {column}; leave a line blank to end a text"
                )
            words.append(cells[column - 1])
            if len(words) > MOST_WORDS:
                raise DataError(
                    f"{path}, line {number}: {MOST_WORDS:,} words since line {begin} without a blank line; leave one"
                    " between sentences"
                )


def _split_lines(lines: Iterable[str], origin: str) -> Iterator[Any]:
    """The texts of each line; None where a pipe has no more for now."""
    is_begun = False
    for number, line in _numbered(lines):
        if line is None:
            # A reader of the first row waits for it.
            if is_begun:
                yield None
            continue
        if not line.strip():
            continue
        row = tuple(line.rstrip("\r\n").split("\t"))
        if len(row) > 2:
            raise DataError(
                f"{origin}, line {number}: has {len(row)} texts; give one a line, or two with a tab between"
            )
        if not all(map(str.strip, row)):
            raise DataError(f"{origin}, line {number}: a text is empty; fill it or remove the line")
        is_begun = True
        yield number, row, ""


def _numbered(lines: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    number = 0
    for line in lines:
        number += line is not None
        yield number, line


def _from_table(table: _Table, columns: Sequence[str], tasks: Mapping[str, Task]) -> Texts:
    names = _text_columns(table, columns, tasks)
    has_ids = ID in table.header and ID not in names
    wanted = [*names, *([ID] if has_ids else [])]
    positions = [table.header.index(name) for name in wanted]

    def picked() -> Iterator[tuple[int, Row, str] | None]:
        for read in table.rows:
            if read is None:
                yield None
                continue
            number, values = read
            cells = [as_text(values.get(n)) for n in wanted] if table.is_objects else [values[p] for p in positions]
            row = tuple(cells[: len(names)])
            if not all(map(str.strip, row)):
                name = names[[not text.strip() for text in row].index(True)]
                raise DataError(
                    f"{table.origin}, {table.unit} {number}: has no text in column {name}; fill it or remove the row"
                )
            yield number, row, cells[-1] if has_ids else ""

    return Texts(tuple(names), table.unit, has_ids, _chunks(picked()))


def _text_columns(table: _Table, columns: Sequence[str], tasks: Mapping[str, Task]) -> list[str]:
    # A header of one column with semicolons in it is separated by them.
    header = table.header[0].split(";") if separation_advice(table.header) else table.header
    has = f"it has {', '.join(map(excerpt, header))}" if looks_like_names(header) else "its header is no names"
    if columns and all(column.isdigit() for column in columns):
        if table.is_objects:
            raise DataError(f"--text-columns: {table.origin} holds objects, whose columns have names; {has}")
        wrong = [column for column in columns if not 1 <= int(column) <= len(table.header)]
        if wrong:
            found = "one column" if len(table.header) == 1 else f"{len(table.header)} columns"
            raise DataError(f"--text-columns {wrong[0]}: {table.origin} has {found}; the first is 1")
        return [table.header[int(column) - 1] for column in columns]
    if columns:
        absent = [column for column in columns if column not in table.header]
        if absent:
            raise DataError(f"--text-columns {absent[0]}: {table.origin} has no such column; {has}")
        return list(columns)
    fitting = list(dict.fromkeys(task.text for task in tasks.values() if set(task.text) <= set(table.header)))
    if len(fitting) != 1:
        reads = "; ".join(f"{name}: {', '.join(task.text)}" for name, task in tasks.items())
        found = "several tasks read columns of it" if fitting else "no task reads columns of it"
        raise DataError(f"{table.origin}: {found} ({reads}), and {has}; write --text-columns, such as a or a,b")
    return list(fitting[0])


def _chunks(rows: Iterator[tuple[int, Row, str] | None]) -> Iterator[Chunk]:
    """Rows in chunks of bounded size; where a pipe has no more for now, with what there is."""
    chunk, letters = Chunk([], [], []), 0
    for read in rows:
        if read is not None:
            number, row, known = read
            chunk.rows.append(row)
            chunk.numbers.append(number)
            chunk.ids.append(known)
            letters += sum(map(len, row))
        is_full = len(chunk.rows) >= CHUNK_ROWS or letters >= CHUNK_LETTERS
        if chunk.rows and (read is None or is_full):
            yield chunk
            chunk, letters = Chunk([], [], []), 0
    if chunk.rows:
        yield chunk


# -- lines -------------------------------------------------------------------------------------------------------------


def _piped() -> Iterator[Any]:
    """Lines of stdin as they come, and None whenever all that were there have been given out."""
    if sys.stdin.isatty():
        raise DataError(NOTHING)
    pipe = getattr(sys.stdin, "buffer", None)
    if pipe is None:
        yield from sys.stdin
        return
    rest, is_first = b"", True
    while piece := pipe.read1(PIPE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_FIELD:
            raise DataError(f"stdin: has a line of more than {LONGEST_FIELD >> 20} MB; end lines with a line feed")
        for line in lines:
            yield _decode(line, "stdin", is_first)
            is_first = False
        if lines:
            yield None
    if rest:
        yield _decode(rest, "stdin", is_first)


def _decode(line: bytes, where: str, is_first: bool) -> str:
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start} of a line)") from error


def _read_lines(path: Path) -> Iterator[str]:
    """The lines of a file, plain or gzipped, with their ends."""
    is_zipped = path.name.lower().endswith(".gz")
    most = max(ALWAYS_INFLATED, MOST_INFLATED * path.stat().st_size) if is_zipped else None
    number = total = 0
    try:
        with closing(_open(path, is_zipped)) as file:
            while line := file.readline(LONGEST_FIELD + 1):
                number, total = number + 1, total + len(line)
                if len(line) > LONGEST_FIELD:
                    raise DataError(f"{path}, line {number}: has more than {LONGEST_FIELD >> 20} MB; cut it")
                if most is not None and total > most:
                    raise DataError(
                        f"{path}: inflates to more than {MOST_INFLATED} times its size; text does not, so check where"
                        " the file comes from, or unpack it first"
                    )
                yield _decode(line, f"{path}, line {number}", number == 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}, line {number + 1}: broken gzip ({error}); copy or download the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); give a file of texts") from error


def _open(path: Path, is_zipped: bool) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if is_zipped else path.open("rb")


# -- tables ------------------------------------------------------------------------------------------------------------


def _open_pipe(columns: Sequence[str]) -> _Table:
    if not all(column.isdigit() for column in columns):
        return _open_jsonl("stdin", _piped())
    rows = _tab_rows(_piped())
    first = next((read for read in rows if read is not None), None)
    if first is None:
        raise DataError(NOTHING)
    header = [str(number + 1) for number in range(len(first[1]))]
    return _Table("stdin", "line", header, _checked_rows("stdin", header, _before(first, rows)))


def _before(first: Any, rows: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rows


def _open_rows(path: Path, suffix: str, wanted: Sequence[Row], *, header: bool) -> _Table:
    lines = _read_lines(path)
    rows = _tab_rows(lines) if suffix.startswith(".tsv") else _csv_rows(path, lines, wanted)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: is empty; it needs a header line and texts")
    if len(first[1]) > MOST_COLUMNS:
        raise DataError(f"{path}: has more than {MOST_COLUMNS:,} columns; leave those that hold the texts")
    if not header:
        names = [str(number + 1) for number in range(len(first[1]))]
        return _Table(str(path), "line", names, _checked_rows(str(path), names, _before(first, rows)))
    if any(count > 1 for count in Counter(first[1]).values()):
        raise DataError(f"{path}, line {first[0]}: a column's name stands there twice; give each another name")
    return _Table(str(path), "line", first[1], _checked_rows(str(path), first[1], rows))


def _checked_rows(origin: str, header: Sequence[str], rows: Iterator[Any]) -> Iterator[Any]:
    for read in rows:
        if read is not None and len(read[1]) != len(header):
            raise DataError(
                f"{origin}, line {read[0]}: has {len(read[1])} values, the first line {len(header)}; mend the line or"
                " its quoting"
            )
        yield read


def _tab_rows(lines: Iterable[Any]) -> Iterator[Any]:
    for number, line in _numbered(lines):
        if line is None:
            yield None
        elif line.strip("\r\n"):
            yield number, line.rstrip("\r\n").split("\t")


def _csv_rows(path: Path, lines: Iterator[str], wanted: Sequence[Row]) -> Iterator[Any]:
    csv.field_size_limit(LONGEST_FIELD)
    first = next((line for line in lines), "")
    found = (separating(first.rstrip("\r\n"), columns) for columns in wanted)
    between = next(filter(None, found), "\t" if "\t" in first and "," not in first else ",")
    reader = csv.reader(_before(first, lines), delimiter=between, strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: bad csv ({error}); write a quote inside a quoted text twice") from error


def _open_jsonl(origin: str, lines: Iterable[Any]) -> _Table:
    objects = _objects(origin, lines)
    first = next((read for read in objects if read is not None), None)
    if first is None:
        raise DataError(NOTHING if origin == "stdin" else f"{origin}: is empty; write one JSON object per line")
    return _Table(origin, "line", list(first[1]), _before(first, objects), is_objects=True)


def _objects(origin: str, lines: Iterable[Any]) -> Iterator[Any]:
    for number, line in _numbered(lines):
        if line is None:
            yield None
        elif line.strip():
            where = f"{origin}, line {number}"
            record = parse_json(line, where, "write one object per line", DataError)
            if not isinstance(record, dict):
                raise DataError(f"{where}: is no JSON object; write one object per line")
            yield number, record


def _open_parquet(path: Path) -> _Table:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(needs_extra(str(path), "pyarrow", "parquet")) from error
    try:
        file = parquet.ParquetFile(path)
        header = list(file.schema_arrow.names)
    except Exception as error:  # pyarrow's, and Python's for what it decodes
        raise DataError(f"{path}: cannot be read as parquet ({excerpt(error)}); write the file again") from error
    if len(header) > MOST_COLUMNS:
        raise DataError(f"{path}: has more than {MOST_COLUMNS:,} columns; leave those that hold the texts")
    return _Table(str(path), "row", header, _parquet_rows(path, file))


def _parquet_rows(path: Path, file: Any) -> Iterator[Any]:
    number = 0
    try:
        with closing(file):
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in zip(*(map(as_text, column.to_pylist()) for column in batch.columns), strict=True):
                    number += 1
                    yield number, row
    except FedmtlError:
        raise
    except Exception as error:  # pyarrow's, and Python's for what it decodes
        raise DataError(f"{path}: cannot be read as parquet ({excerpt(error)}); write the file again") from error
