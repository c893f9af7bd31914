"""Tables of strings out of csv, tsv, jsonl and parquet files, plain or gzipped.

A file may be anybody's. What it can come to in memory is bounded before it is there, and whatever is wrong with it is a
DataError with the file and, where there is one, the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedmtl.errors import DataError, needs_extra
from fedmtl.foreign import excerpt, parse_json

DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";"}
SUFFIXES = (".tsv.gz", ".tsv", ".csv.gz", ".csv", ".jsonl.gz", ".jsonl", ".parquet")
# Which file of a folder scores a task, the first that is there; further ones are `dev_NAME` or `validation_NAME`.
VALIDATION_FILES = ("dev", "validation", "dev_matched", "validation_matched")

# A text longer than the csv module's 128 KB is a long text; one of more than this is a quote that was never closed.
LONGEST_FIELD = 1 << 24
# A task's whole training part is below 1 GB in all public text sets; in memory a table is several times its file.
MOST_BYTES = 4 << 30
# Text becomes 2 to 20 times smaller by gzip, the most repetitive 100 times; gzip itself can hide 1,000 times its size.
MOST_INFLATED = 100
# Small files may be any ratio: ten thousand equal lines are harmless.
ALWAYS_INFLATED = 64 << 20
# A row of a text set has some dozens of values. Each jsonl row may bring new names: rows times names are stored.
MOST_COLUMNS = 1000
PARQUET_ROWS = 4096
# A file without a config: columns that others call so are taken for the label and the texts.
LABEL_NAMES = ("label", "labels", "score", "class", "target", "category", "topic", "gold_label", "is_duplicate")
TEXT_NAMES = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("text1", "text2"),
    ("sentence",),
    ("text",),
    ("review",),
    ("message",),
    ("content",),
    ("question",),
)
COMMON_NAMES = frozenset({"id", *LABEL_NAMES, *(name for names in TEXT_NAMES for name in names)})
# What can be the name of a column.
COLUMN_NAME = re.compile(r"[^\W\d][\w.-]{0,39}")
# The same of a few words, as people call the columns of a spreadsheet. A short text looks alike.
WORDED_NAME = re.compile(r"[^\W\d][\w.-]*( [\w.-]+){0,3}\??")


@dataclass(frozen=True)
class Table:
    """Columns of equal length; every value is a string, a missing one is empty.

    `numbers` says where each row stood in what was read, in `unit`s from 1; without it, rows count from 1. `note` says
    what a reader of the file's name would not expect, such as tabs in a .csv.
    """

    columns: dict[str, list[str]]
    origin: str
    numbers: Sequence[int] | None = None
    unit: Literal["line", "row"] = "row"
    note: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def location(self, row: int) -> str:
        """Return where a row stood, in words for a message, such as `train.tsv, line 7`."""
        return f"{self.origin}, {self.unit} {self.number(row)}"

    def number(self, row: int) -> int:
        """The line or row, from 1, at which a row stood."""
        return row + 1 if self.numbers is None else self.numbers[row]


def read_table(path: Path, delimiter: str | None = None, columns: Sequence[str] = ()) -> Table:
    """The whole file, read by its suffix; blank lines are skipped. Anything else wrong is a DataError.

    `delimiter` is what stands between the columns of a csv or tsv file, one character or a word of `DELIMITERS`.
    Without it a .csv whose header has tabs and no commas is read by tabs. Where the `columns` that the file should have
    are known, it is what separates them in the header. What the file's name does not say, its `note` says.
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path}: the name does not say what it holds; use a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path (in a config it is relative to the config file)")
    if delimiter is not None and not suffix.startswith((".csv", ".tsv")):
        raise DataError(f"{path}: has no delimiter; remove `source.delimiter`, which is for csv and tsv files")
    if suffix == ".parquet":
        return _read_parquet(path)
    text = _read_text(path, gzipped=suffix.endswith(".gz"))
    if not text.strip():
        raise DataError(f"{path}: is empty; it needs a header line and examples, or one JSON object per line")
    if suffix.startswith(".jsonl"):
        return _read_jsonl(path, text)
    between, usual = DELIMITERS.get(delimiter or "", delimiter), "\t" if suffix.startswith(".tsv") else ","
    if between is None and columns:
        header = next(line for line in _lines(text) if line.strip())
        between = separating(header, columns, first=usual)
    if between is None:
        between = usual if usual == "\t" else _sniffed(path, text)
    is_plain = between == usual == "\t"
    table = _read_rows(path, _tsv_rows(text) if is_plain else _csv_rows(path, text, between))
    if delimiter is not None or between == usual:
        return table
    words = {value: name for name, value in DELIMITERS.items()}
    return replace(table, note=f"{path.name} is separated by {words.get(between, between)}s, and is read so")


def separating(header: str, columns: Sequence[str], first: str = ",") -> str | None:
    """What separates the columns of a header that has all of these; None where none of the usual ones does."""
    csv.field_size_limit(LONGEST_FIELD)
    for between in dict.fromkeys((first, *DELIMITERS.values(), "|")):
        try:
            found = next(csv.reader([header], delimiter=between), [])
        except csv.Error:
            continue
        if set(columns) <= set(found):
            return between
    return None


def separation_advice(header: Sequence[str]) -> str:
    """What to write where the header is one column with semicolons in it; empty for any other header."""
    if len(header) != 1 or ";" not in header[0] or not all(map(WORDED_NAME.fullmatch, header[0].split(";"))):
        return ""
    return "it looks separated by `;`: write `source.delimiter: ;`, or for check `--delimiter ';'`"


def _sniffed(path: Path, text: str) -> str:
    """What separates the columns of a .csv by its header: commas, or tabs where there are no commas."""
    header = next(line for line in _lines(text) if line.strip())
    if "\t" not in header:
        return ","
    csv.field_size_limit(LONGEST_FIELD)
    try:
        by_commas, by_tabs = (len(next(csv.reader([header], delimiter=each), [])) for each in (",", "\t"))
    except csv.Error:
        # Whoever reads the lines says where.
        return ","
    if by_tabs > 1 and by_commas > 1:
        raise DataError(
            f"{path}: its header has {by_tabs} columns by tabs and {by_commas} by commas; write `source.delimiter: tab`"
            " (or `comma`), or name a file without quoting .tsv"
        )
    return "\t" if by_tabs > 1 else ","


def read_texts(path: Path, columns: Sequence[str]) -> tuple[list[str], ...] | None:
    """Read the texts of a file without labels, one list a column; None where it has none for that many columns.

    A table with these columns gives them, another one its first column, or both where there are two and two are
    requested. A file that ends in .txt or .txt.gz has one text a line. Empty texts are left out.
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


def find_table(folder: Path, stems: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> Path | None:
    """The first file in the folder named by one of the stems and a suffix we read, or nothing."""
    paths = (folder / f"{stem}{suffix}" for stem in stems for suffix in suffixes)
    return next((path for path in paths if path.is_file()), None)


def validation_tables(folder: Path) -> list[Path]:
    """Every file in the folder that a task may be scored on, by its name."""
    names = tuple(f"{stem}{end}" for stem in ("dev", "validation") for end in ("_", *SUFFIXES))
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.name.startswith(names) and path.name.endswith(SUFFIXES))


def is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def looks_like_names(header: Sequence[str]) -> bool:
    """Whether these can be names of columns; a file without a header begins with its first example."""
    if not COMMON_NAMES.isdisjoint(map(str.lower, header)):
        return all(WORDED_NAME.fullmatch(name) and len(name) <= 40 for name in header)
    return all(COLUMN_NAME.fullmatch(name) for name in header)


def _shown(header: Sequence[str]) -> str:
    """The names of columns in a message, which must not quote an example: only where one of them is common."""
    is_header = looks_like_names(header) and not COMMON_NAMES.isdisjoint(map(str.lower, header))
    return f" ({excerpt(', '.join(header))})" if is_header else ""


def as_number(value: str) -> float:
    """A text as a number; not a number where it is none."""
    try:
        return float(value)
    except ValueError:
        return float("nan")


def as_text(value: Any) -> str:
    """A value as a table holds it: nothing and not-a-number are empty, true and false as JSON writes them."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def file_text(path: Path) -> str:
    """All of a file, unpacked where its name ends in .gz; what is not UTF-8 or too much of it is a DataError."""
    return _read_text(path, gzipped=path.name.lower().endswith(".gz"))


def _read_text(path: Path, *, gzipped: bool) -> str:
    try:
        data = _unzip(path) if gzipped else _read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: is not UTF-8; convert it, such as with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def _read_bytes(path: Path) -> bytes:
    if path.stat().st_size > MOST_BYTES:
        raise DataError(f"{path}: has more than {MOST_BYTES >> 30} GB; cut it into several tasks or take a sample")
    return path.read_bytes()


def _unzip(path: Path) -> bytes:
    pieces: list[bytes] = []
    most = min(MOST_BYTES, max(ALWAYS_INFLATED, MOST_INFLATED * path.stat().st_size))
    total = 0
    with gzip.open(path) as file:
        try:
            while piece := file.read1(1 << 20):
                pieces.append(piece)
                total += len(piece)
                if total > most:
                    raise DataError(
                        f"{path}: inflates to more than {most >> 20:,} MB, {MOST_INFLATED} times its size or"
                        f" {MOST_BYTES >> 30} GB; text does not, so check where the file comes from, or unpack it first"
                    )
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


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: bad csv ({error}); write a quote inside a quoted text twice") from error


def _read_rows(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Table:
    first, header = next(rows, (1, []))
    if not header:
        raise DataError(f"{path}: is empty; it needs a header line and examples, or one JSON object per line")
    _check_columns(path, len(header))
    twice = sorted(name for name, count in Counter(header).items() if count > 1)
    if twice:
        name = f"column {twice[0]!r}" if _shown(header) else "the name of a column"
        raise DataError(f"{path}, line {first}: {name} stands there twice; give each column its own name")
    lines: list[int] = []
    records: list[list[str]] = []
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line}: has {len(row)} values, the header {len(header)}{_shown(header)}"
                f"; {separation_advice(header) or 'mend the line or its quoting'}"
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
    names: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}, line {number}", "write one object per line", DataError)
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: is no JSON object; write one object per line")
        lines.append(number)
        records.append(record)
        names.update(dict.fromkeys(record))
        _check_columns(path, len(names))
    if not names:
        raise DataError(f"{path}: its objects have no keys; write one object per line with the task's columns")
    columns = {name: [as_text(record.get(name)) for record in records] for name in names}
    return Table(columns, str(path), lines, "line")


def _check_columns(path: Path, count: int) -> None:
    if count > MOST_COLUMNS:
        raise DataError(f"{path}: has more than {MOST_COLUMNS:,} columns; keep those that the task needs")


def _read_parquet(path: Path) -> Table:
    columns, _ = parquet_file(path, as_text)
    table = Table(columns, str(path))
    if not len(table):
        raise DataError(f"{path}: is empty; add examples or name another file")
    return table


def parquet_file(
    path: Path, taken: Callable[[Any], Any] = lambda value: value
) -> tuple[dict[str, list[Any]], Callable[[str], list[str] | None]]:
    """The columns of a parquet file, each value as it is `taken`, and the names of a column's class labels."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(needs_extra(str(path), "pyarrow", "parquet")) from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_parquet(path, file.metadata)
            return _parquet_columns(path, file, taken), _class_names(file.schema_arrow.metadata or {})
    except DataError:
        raise
    except Exception as error:  # pyarrow's, and Python's for what it decodes
        raise DataError(f"{path}: cannot be read as parquet ({excerpt(error)}); write the file again") from error


def _class_names(metadata: Mapping[bytes, bytes]) -> Callable[[str], list[str] | None]:
    """What `datasets` writes beside a table's columns: how the numbers of class labels are called."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return lambda column: None

    def names(column: str) -> list[str] | None:
        feature = features.get(column) if isinstance(features, dict) else None
        while isinstance(feature, dict) and "names" not in feature and "feature" in feature:
            feature = feature["feature"]
        found = feature.get("names") if isinstance(feature, dict) else None
        return list(map(str, found)) if isinstance(found, list) else None

    return names


def _check_parquet(path: Path, metadata: Any) -> None:
    """What the file says of itself, before any of it is decompressed."""
    _check_columns(path, metadata.num_columns)
    total = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if total > MOST_BYTES:
        raise DataError(f"{path}: holds more than {MOST_BYTES >> 30} GB; cut it into several tasks or take a sample")


def _parquet_columns(path: Path, file: Any, taken: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """All columns, read in batches: a dictionary of a few long texts may stand for any number of rows."""
    columns: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
    total = 0
    for batch in file.iter_batches(batch_size=PARQUET_ROWS):
        total += batch.nbytes
        if total > MOST_BYTES:
            raise DataError(f"{path}: inflates to more than {MOST_BYTES >> 30} GB; take a sample of it")
        for name, column in batch.to_pydict().items():
            columns[name].extend(map(taken, column))
    return columns
