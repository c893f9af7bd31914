"""Tagged texts out of files: CoNLL columns, lists of words and tags, and texts with spans of characters.

Each becomes a row of a table: the text, with a SEPARATOR behind each word where the file has words, and its IOB2 tags,
with the same between them. Tags of IOB1, IOB2 and IOBES are read, by the rule of `lenient_spans`; what stands where its
scheme does not have it is counted, and the table's note says where the first is. Whatever else is wrong is a DataError
with the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmtl.errors import DataError
from fedmtl.foreign import excerpt, parse_json
from fedmtl.tasks.sources import Table, as_text, file_text, parquet_file
from fedmtl.tasks.tag_schemes import PREFIXES, Span, found_scheme, lenient_spans, misplaced, split_tag, to_iob2
from fedmtl.tasks.words import SEPARATOR, join_words, split_words

COLUMNS = (".conll", ".iob", ".iob2", ".bio", ".tsv", ".txt")
CONLL = tuple(f"{ending}{zipped}" for ending in COLUMNS for zipped in (".gz", ""))
# Those that hold nothing else.
CONLL_ALONE = tuple(ending for ending in CONLL if not ending.startswith((".tsv", ".txt")))
LISTS = (".jsonl.gz", ".jsonl")
TAG_SUFFIXES = (*CONLL, *LISTS, ".parquet")
# A longer sentence is a file without blank lines.
MOST_WORDS = 5000
# What others call these, where the task's names are not there.
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("tags", "ner_tags", "labels", "label")
TEXT_NAMES = ("text", "sentence", "content")
SPAN_NAMES = ("spans", "label", "labels", "entities", "annotations")
MOST_SHOWN = 40

# The names of a column's class labels, where they are numbers.
Names = Callable[[str], "Sequence[str] | None"]


@dataclass
class _Rows:
    """Rows as they are read: texts, the tags as they stand there with where each stood, and what was left out."""

    origin: str
    unit: str
    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tags: list[list[tuple[str, str]]] = field(default_factory=list)
    places: list[Sequence[int]] = field(default_factory=list)
    others: list[dict[str, str]] = field(default_factory=list)
    left_out: int = 0

    def add(
        self,
        number: int,
        text: str,
        tags: list[tuple[str, str]],
        places: Sequence[int] = (),
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.numbers.append(number)
        self.texts.append(text)
        self.tags.append(tags)
        self.places.append(places or [number] * len(tags))
        self.others.append(dict(others or {}))

    def table(self, text: str, label: str) -> Table:
        if not self.texts:
            raise DataError(f"{self.origin}: holds no tagged text; add some, or name another file")
        scheme = found_scheme(self.tags)
        wrong = [(row, at) for row, tags in enumerate(self.tags) if (at := misplaced(tags, scheme)) is not None]
        tags = [SEPARATOR.join(to_iob2(lenient_spans(tags), len(tags))) for tags in self.tags]
        extra = dict.fromkeys(name for others in self.others for name in others if name not in (text, label))
        columns = {text: self.texts, label: tags}
        columns |= {name: [others.get(name, "") for others in self.others] for name in extra}
        unit: Any = self.unit
        return Table(columns, self.origin, self.numbers, unit, self._note(scheme, wrong))

    def _note(self, scheme: str, wrong: Sequence[tuple[int, int]]) -> str:
        notes = []
        if wrong:
            row, at = wrong[0]
            first = f"{self.tags[row][at][0]}-{self.tags[row][at][1]}"
            notes.append(
                f"{len(wrong)} texts have a tag that {scheme} does not have there, the first is {excerpt(first)} at"
                f" {self.origin}, {self.unit} {self.places[row][at]}; it is read as a B- where no span of its type goes"
                " on"
            )
        if self.left_out:
            notes.append(f"{self.left_out} records without an accepted answer are left out")
        return "; ".join(notes)


def read_tags(path: Path, text: str, label: str) -> Table:
    """A file as a table with these two columns.

    In a file of columns they are the column of the words and that of the tags by number from 1, or else the first and
    the last; in any other their names, or one of the usual names where these are not there.
    """
    name = path.name.lower()
    if not name.endswith(TAG_SUFFIXES):
        raise DataError(
            f"{path}: is no file of tagged texts; use CoNLL columns ({', '.join(COLUMNS)}), .jsonl (both also .gz) or"
            " .parquet"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path (in a config it is relative to the config file)")
    if name.endswith(".parquet"):
        return _read_parquet(path, text, label)
    content = file_text(path)
    if not content.strip():
        raise DataError(f"{path}: is empty; it needs tagged texts")
    if name.endswith(CONLL):
        return _read_columns(path, content, text, label)
    rows = _Rows(str(path), "line")
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            record = parse_json(line, where, "write one object per line", DataError)
            if not isinstance(record, dict):
                raise DataError(f"{where}: is no JSON object; write one object per line")
            _add_record(rows, record, text, label, number, where, lambda column: None)
    return rows.table(text, label)


def tagged_rows(columns: Mapping[str, Sequence[Any]], origin: str, text: str, label: str, names: Names) -> Table:
    """The same for the columns of a dataset, in the types that it has."""
    rows = _Rows(origin, "row")
    for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
        record = dict(zip(columns, values, strict=True))
        _add_record(rows, record, text, label, number, f"{origin}, row {number}", names)
    return rows.table(text, label)


def looks_tagged(path: Path) -> bool:
    """Whether a file's name, or the first line of its JSON, says that its texts are tagged."""
    name = path.name.lower()
    if name.endswith(CONLL_ALONE):
        return True
    if not name.endswith(LISTS) or not path.is_file():
        return False
    line = file_text(path).lstrip().partition("\n")[0]
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    known = (*WORD_NAMES, *TAG_NAMES, *SPAN_NAMES)
    return isinstance(record, dict) and any(isinstance(record.get(key), list) for key in known)


# -- columns -----------------------------------------------------------------------------------------------------------


def _read_columns(path: Path, content: str, text: str, label: str) -> Table:
    rows = _Rows(str(path), "line")
    width = 0
    sentence: list[tuple[int, str, tuple[str, str]]] = []

    def close() -> None:
        if sentence:
            words = join_words([word for _, word, _ in sentence])
            rows.add(sentence[0][0], words, [tag for *_, tag in sentence], [line for line, *_ in sentence])
            sentence.clear()

    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("-DOCSTART-"):
            close()
            continue
        where, cells = f"{path}, line {number}", column_cells(line)
        if is_comment(line, cells, width):
            continue
        width = width or len(cells)
        if len(cells) < 2:
            raise DataError(f"{where}: has one column; write a word and its tag, with a tab or a space between")
        if len(cells) != width:
            raise DataError(f"{where}: has {len(cells)} columns, the first line {width}; write as many in every line")
        word, tag = (cells[_number(name, width, side, where)] for name, side in ((text, "text"), (label, "label")))
        if not word.strip():
            raise DataError(f"{where}: its word is empty; remove the line, or leave it blank to end a sentence")
        sentence.append((number, word, _split(tag, where)))
        if len(sentence) > MOST_WORDS:
            raise DataError(
                f"{where}: {MOST_WORDS:,} words since line {sentence[0][0]} without a blank line; leave one between"
                " sentences"
            )
    close()
    return rows.table(text, label)


def column_cells(line: str) -> list[str]:
    """The columns of a line of a CoNLL file."""
    return line.split("\t") if "\t" in line else line.split()


def is_comment(line: str, cells: Sequence[str], width: int) -> bool:
    """Whether a line that begins with # is no word with a tag; `width` is that of the first line, 0 before it."""
    return line.startswith("#") and (len(cells) != (width or len(cells)) or split_tag(cells[-1]) is None)


def _number(name: str, width: int, side: str, where: str) -> int:
    """The column that a task's `text` or `label` is, from 0."""
    if not name.isdigit():
        return 0 if side == "text" else width - 1
    if not 1 <= int(name) <= width:
        raise DataError(f"{where}: has {width} columns, and the task's `{side}` is column {name}; the first is 1")
    return int(name) - 1


def _split(tag: Any, where: str) -> tuple[str, str]:
    found = split_tag(tag) if isinstance(tag, str) else None
    if found is None:
        better = ""
        if isinstance(tag, str) and len(tag) > 2 and tag[0].upper() in PREFIXES and tag[1] in "-_":
            better = f"; write {excerpt(tag[0].upper() + '-' + tag[2:])}"
        elif isinstance(tag, str) and tag.lower() in ("o", "0", "_", "-", "none", "outside"):
            better = "; write O"
        raise DataError(
            f"{where}: {excerpt(repr(tag)[:MOST_SHOWN])} is no tag{better or ', such as O, B-PER or I-PER'}"
        ).coded("label_unknown")
    return found


# -- records -----------------------------------------------------------------------------------------------------------


def _add_record(
    rows: _Rows, record: Mapping[str, Any], text: str, label: str, number: int, where: str, names: Names
) -> None:
    """Add a record with lists of words and tags, or with a text and its spans."""
    if record.get("answer") in ("reject", "ignore"):
        rows.left_out += 1
        return
    record = _of_label_studio(record)
    others = {
        name: as_text(value) for name, value in record.items() if isinstance(value, str | int | float | bool | None)
    }
    words = _first(record, (text, *WORD_NAMES), lambda value: isinstance(value, list) and not _are_objects(value))
    plain = _first(record, (text, *TEXT_NAMES), lambda value: isinstance(value, str))
    if words is not None:
        tags = _first(record, (label, *TAG_NAMES), lambda value: isinstance(value, list))
        if tags is None:
            raise DataError(f"{where}: has no list of tags; name it under the task's `label`. It has {_keys(record)}")
        split = _of_lists(record[words], record[tags], names(tags), where)
        rows.add(number, join_words(record[words]), split, (), others)
    elif plain is not None:
        spans = _first(record, (label, *SPAN_NAMES), lambda value: isinstance(value, list))
        if spans is None:
            raise DataError(f"{where}: has no list of spans; name it under the task's `label`. It has {_keys(record)}")
        others.pop(plain, None)
        rows.add(number, record[plain], _of_spans(record[plain], record[spans], where), (), others)
    else:
        raise DataError(
            f"{where}: has neither a list of words nor a text; name it under the task's `text`. It has {_keys(record)}"
        )


def _first(record: Mapping[str, Any], names: Sequence[str], fits: Callable[[Any], bool]) -> str | None:
    return next((name for name in names if name in record and fits(record[name])), None)


def _are_objects(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], dict)


def _keys(record: Mapping[str, Any]) -> str:
    return excerpt(", ".join(map(str, record)) or "no keys")


def _of_lists(words: list[Any], tags: list[Any], names: Sequence[str] | None, where: str) -> list[tuple[str, str]]:
    if not words:
        raise DataError(f"{where}: has no words; remove it")
    if len(words) != len(tags):
        raise DataError(f"{where}: has {len(words)} words and {len(tags)} tags; write one for each word")
    for at, word in enumerate(words, start=1):
        if not isinstance(word, str) or not word.strip():
            raise DataError(f"{where}: word {at} is {'empty' if isinstance(word, str) else 'no text'}; mend the list")
    found = []
    for at, tag in enumerate(tags, start=1):
        if isinstance(tag, int) and not isinstance(tag, bool):
            if names is None:
                raise DataError(f"{where}: its tags are numbers without names; write tags such as B-PER")
            if not 0 <= tag < len(names):
                raise DataError(f"{where}: tag {at} is {tag}, and {len(names)} have names; mend the list")
            tag = names[tag]
        found.append(_split(tag, where))
    return found


def _of_spans(text: str, spans: list[Any], where: str) -> list[tuple[str, str]]:
    """The tags of a text's words by its spans of characters."""
    words = split_words(text)
    if not words:
        raise DataError(f"{where}: its text has no words; remove it")
    begins, ends = ({edge: at for at, edge in enumerate(side)} for side in zip(*words, strict=True))
    found: list[Span] = []
    for start, end, kind in sorted(_span(each, where) for each in spans):
        shown = f"the span {start} to {end}"
        if not 0 <= start < end <= len(text):
            raise DataError(f"{where}: {shown} is not in its text of {len(text)} letters; mend the numbers")
        inner = text[start:end]
        if not inner.strip():
            raise DataError(f"{where}: {shown} has no letters in it; remove it")
        first, last = start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())
        if first not in begins or last not in ends:
            raise DataError(
                f"{where}: {shown} {'begins' if first not in begins else 'ends'} inside a word; write where words begin"
                " and end, counted in letters from 0"
            )
        if found and begins[first] < found[-1][2]:
            raise DataError(f"{where}: {shown} overlaps the one before; keep one, or make two tasks of them")
        found.append((kind, begins[first], ends[last] + 1))
    return [split_tag(tag) or ("O", "") for tag in to_iob2(found, len(words))]


def _span(given: Any, where: str) -> tuple[int, int, str]:
    """A span as Doccano, Prodigy, Label Studio and others write it: its first letter, the one behind it, its type."""
    values: Sequence[Any] = ()
    if isinstance(given, list) and len(given) == 3:
        values = given
    elif isinstance(given, dict):
        inner = given.get("value", given)
        kinds = inner.get("labels") if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            kind = inner.get("label", kinds[0] if isinstance(kinds, list) and kinds else inner.get("type"))
            values = (inner.get("start", inner.get("start_offset")), inner.get("end", inner.get("end_offset")), kind)
    is_whole = len(values) == 3 and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in values[:2])
    if not is_whole:
        shown = excerpt(json.dumps(given)[:MOST_SHOWN])
        raise DataError(f"{where}: {shown} is no span; write [start, end, type] in letters from 0")
    if not isinstance(values[2], str) or not values[2].strip():
        raise DataError(f"{where}: the span {values[0]} to {values[1]} has no type; write [start, end, type]")
    return values[0], values[1], values[2].strip()


def _of_label_studio(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Label Studio writes as `data` and `annotations`, as a text with spans; anything else as it is."""
    data, annotations = record.get("data"), record.get("annotations")
    if not isinstance(data, dict) or not isinstance(annotations, list):
        return record
    whole = [each for each in annotations if isinstance(each, dict) and not each.get("was_cancelled")]
    results = whole[0].get("result") or [] if whole else []
    spans = [
        each
        for each in results
        if isinstance(each, dict) and each.get("type", "labels") in ("labels", "hypertextlabels")
    ]
    return {**data, "spans": spans}


# -- parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, text: str, label: str) -> Table:
    columns, names = parquet_file(path)
    return tagged_rows(columns, str(path), text, label, names)
