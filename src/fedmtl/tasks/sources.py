"""Tables of strings out of csv, tsv, jsonl and parquet files, plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmtl.errors import DataError

SUFFIXES = (".tsv.gz", ".tsv", ".csv.gz", ".csv", ".jsonl.gz", ".jsonl", ".parquet")

# A text longer than the csv module's 128 KB is a long text, not a broken file.
LONGEST_FIELD = 1 << 30


@dataclass(frozen=True)
class Table:
    """Columns of equal length; every value is a string, a missing one is empty.

    `numbers` says where each row stood in what was read, in `unit`s from 1; without it, rows count from 1.
    """

    columns: dict[str, list[str]]
    origin: str
    numbers: Sequence[int] | None = None
    unit: Literal["line", "row"] = "row"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def place(self, row: int) -> str:
        """Where a row stood, in words for a message, such as `train.tsv, line 7`."""
        number = row + 1 if self.numbers is None else self.numbers[row]
        return f"{self.origin}, {self.unit} {number}"


def read_table(path: Path) -> Table:
    """The whole file, read by its suffix; blank lines are skipped. Anything else wrong is a DataError."""
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path}: the name does not say what it holds; use a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path (in a config it is relative to the config file)")
    if suffix == ".parquet":
        return _read_parquet(path)
    text = _read_text(path, gzipped=suffix.endswith(".gz"))
    if not text.strip():
        raise DataError(f"{path}: is empty; it needs a header line and examples, or one JSON object per line")
    if suffix.startswith(".jsonl"):
        return _read_jsonl(path, text)
    return _read_rows(path, _csv_rows(path, text) if suffix.startswith(".csv") else _tsv_rows(text))


def read_texts(path: Path, columns: Sequence[str]) -> tuple[list[str], ...] | None:
    """The texts of a file without labels, one list a column; None where it has none for that many.

    A table with these columns gives them, another one its first column, or both where there are two and two are asked
    for. A file that ends in .txt or .txt.gz has one text a line. Empty texts are left out.
    """
    if path.name.lower().endswith((".txt", ".txt.gz")):
        if len(columns) > 1:
            return None
        if not path.is_file():
            raise DataError(f"{path}: no such file; check the path (in a config it is relative to the config file)")
        return ([line for line in _lines(_read_text(path, gzipped=path.name.lower().endswith(".gz"))) if line.strip()],)
    table = read_table(path)
    names = list(columns) if set(columns) <= set(table.columns) else list(table.columns)
    if names != list(columns) and len(columns) == 2 != len(names):
        return None
    rows = [row for row in zip(*(table.columns[name] for name in names[: len(columns)]), strict=True) if all(row)]
    return tuple(list(column) for column in zip(*rows, strict=True)) or tuple([] for _ in columns)


def find_table(folder: Path, stems: Sequence[str]) -> Path | None:
    """The first file in the folder named by one of the stems and a suffix we read, or nothing."""
    paths = (folder / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def as_text(value: Any) -> str:
    """A value as a table holds it: nothing and not-a-number are empty, true and false as JSON writes them."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def _read_text(path: Path, *, gzipped: bool) -> str:
    try:
        data = _unzip(path) if gzipped else path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: is not UTF-8; convert it with `iconv -t UTF-8`") from error


def _unzip(path: Path) -> bytes:
    pieces: list[bytes] = []
    with gzip.open(path) as file:
        try:
            while piece := file.read1(1 << 20):
                pieces.append(piece)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            line = sum(piece.count(b"\n") for piece in pieces) + 1
            raise DataError(f"{path}, line {line}: broken gzip ({error}); copy or download the file again") from error
    return b"".join(pieces)


def _lines(text: str) -> list[str]:
    # Not splitlines(): a text may hold U+2028 or U+0085, which are no line ends in a tsv.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _tsv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(_lines(text), start=1):
        if line:
            yield number, line.split("\t")


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: bad csv ({error}); write a quote inside a quoted text twice") from error


def _read_rows(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Table:
    _, header = next(rows)
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: column {twice[0]!r} stands there twice; give each column its own name")
    lines: list[int] = []
    records: list[list[str]] = []
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line}: has {len(row)} values, the header {len(header)} ({', '.join(header)})"
                "; mend the line or its quoting"
            )
        lines.append(line)
        records.append(row)
    if not records:
        raise DataError(f"{path}: has a header line and no examples; add some or name another file")
    columns = dict(zip(header, map(list, zip(*records, strict=True)), strict=True))
    return Table(columns, str(path), lines, "line")


def _read_jsonl(path: Path, text: str) -> Table:
    lines: list[int] = []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: bad JSON ({error.msg} at character {error.colno}); write one object per line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: is no JSON object; write one object per line")
        lines.append(number)
        records.append(record)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [as_text(record.get(name)) for record in records] for name in names}
    return Table(columns, str(path), lines, "line")


def _read_parquet(path: Path) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install fedmtl[parquet]`") from error
    try:
        values = parquet.read_table(path).to_pydict()
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be read as parquet ({reason}); write the file again") from error
    table = Table({name: [as_text(value) for value in column] for name, column in values.items()}, str(path))
    if not len(table):
        raise DataError(f"{path}: is empty; add examples or name another file")
    return table
