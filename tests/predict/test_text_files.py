"""Texts are read a chunk at a time from every format, and what is wrong names a line and no text."""

import csv
import gzip
import io
import json
import os

import pytest

from fedmtl.errors import DataError
from fedmtl.predict import text_files
from fedmtl.predict.answer_files import answer_columns, write_answers
from fedmtl.predict.answers import Prediction
from fedmtl.predict.text_files import open_texts
from fedmtl.tasks.sources import read_table
from fedmtl.tasks.task import Task

SINGLE = Task("mood", "classification", ("sentence",), "label", "accuracy", ("no", "yes"))
PAIR = Task("near", "regression", ("a", "b"), "label", "pearson")
TASKS = {"mood": SINGLE, "near": PAIR}
SECRET = "the patient's secret"


def rows_of(texts):
    return [row for chunk in texts.chunks for row in chunk.rows]


def write_table(path, records):
    data = io.StringIO(newline="")
    if ".jsonl" in path.name:
        data.write("".join(json.dumps(record) + "\n" for record in records))
    else:
        writer = csv.DictWriter(data, records[0], delimiter="\t" if ".tsv" in path.name else ",")
        writer.writeheader()
        writer.writerows(records)
    content = data.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz"])
def test_every_format_gives_the_same_rows_with_their_lines_and_ids(tmp_path, ending):
    records = [{"id": f"x{n}", "a": f"first {n}", "b": f"second {n}"} for n in range(5)]
    path = write_table(tmp_path / f"t{ending}", records)
    texts = open_texts(path, [], TASKS)
    assert texts.names == ("a", "b")
    (chunk,) = texts.chunks
    assert chunk.rows == [(f"first {n}", f"second {n}") for n in range(5)]
    assert chunk.ids == [f"x{n}" for n in range(5)]
    assert chunk.numbers == [n + (1 if "jsonl" in ending else 2) for n in range(5)]
    assert rows_of(open_texts(path, ["b"], TASKS)) == [(f"second {n}",) for n in range(5)]


def test_parquet_gives_its_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": [1, 2], "sentence": ["one", "two"]}), tmp_path / "t.parquet")
    texts = open_texts(tmp_path / "t.parquet", [], TASKS)
    assert (texts.unit, rows_of(texts)) == ("row", [("one",), ("two",)])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        open_texts(tmp_path / "broken.parquet", [], TASKS)


def test_columns_are_named_by_number_also_without_a_header(tmp_path):
    (tmp_path / "t.csv").write_text('x,y\n1,"a, b"\n2,"c\nd"\n')
    assert rows_of(open_texts(tmp_path / "t.csv", ["2"], TASKS)) == [("a, b",), ("c\nd",)]
    texts = open_texts(tmp_path / "t.csv", ["2", "1"], TASKS, header=False)
    assert rows_of(texts) == [("y", "x"), ("a, b", "1"), ("c\nd", "2")]


def test_columns_by_number_are_those_that_the_tasks_columns_are_separated_by(tmp_path):
    (tmp_path / "t.csv").write_text('n;sentence\n1;"a, b; c"\n')
    assert rows_of(open_texts(tmp_path / "t.csv", ["2"], TASKS)) == [("a, b; c",)]
    (tmp_path / "u.csv").write_text("n;other\n1;x\n")
    with pytest.raises(DataError, match=r"--text-columns 2: .*u.csv has one column; the first is 1"):
        open_texts(tmp_path / "u.csv", ["2"], TASKS)


def test_a_file_of_lines_or_of_tabs_without_a_header_is_texts(tmp_path):
    for name in ("t.txt", "t.tsv", "plain"):
        (tmp_path / name).write_text("a fine film\tthe film\r\n\nx y\tz\n")
        assert rows_of(open_texts(tmp_path / name, [], TASKS)) == [("a fine film", "the film"), ("x y", "z")]


def test_a_large_file_comes_in_chunks_and_is_not_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_ROWS", 4)
    path = tmp_path / "t.csv"
    path.write_text("sentence\n" + "".join(f"text {n}\n" for n in range(10)) + "\xff")
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\n")
    chunks = open_texts(path, [], TASKS).chunks
    assert [len(next(chunks).rows) for _ in range(2)] == [4, 4]
    # The broken line is met when it is its turn.
    with pytest.raises(DataError, match=r"t.csv, line 12: is not UTF-8 text"):
        next(chunks)


def test_a_line_of_a_pipe_is_there_before_the_next_is_written(monkeypatch):
    ours, theirs = os.pipe()
    with os.fdopen(ours, "r") as pipe, os.fdopen(theirs, "wb", buffering=0) as writer:
        monkeypatch.setattr("sys.stdin", pipe)
        writer.write(b"one\n")
        texts = open_texts(None, [], TASKS)
        assert next(texts.chunks).rows == [("one",)]
        writer.write(b"two\nthree\nfo")
        chunk = next(texts.chunks)
        assert (chunk.rows, chunk.numbers) == ([("two",), ("three",)], [2, 3])
        writer.write("ür".encode())
        writer.close()
        assert [chunk.rows for chunk in texts.chunks] == [[("foür",)]]


def test_a_pipe_has_objects_or_columns_where_columns_are_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"t": "one"}\n{"t": "two", "x": 1}\n'))
    assert rows_of(open_texts(None, ["t"], TASKS)) == [("one",), ("two",)]
    monkeypatch.setattr("sys.stdin", io.StringIO("7\tone\n8\ttwo\n"))
    assert rows_of(open_texts(None, ["2"], TASKS)) == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("name", "content", "columns", "error"),
    [
        ("t.csv", f"sentence,n\n{SECRET},1\n{SECRET}\n", [], "t.csv, line 3: has 1 values, the first line 2"),
        ("t.csv", f'sentence\n"{SECRET}\n', [], "t.csv, line 2: bad csv"),
        ("t.csv", f"sentence,n\n{SECRET},1\n ,2\n", [], "t.csv, line 3: has no text in column sentence; fill it"),
        ("t.csv", f"text,n\n{SECRET},1\n", [], "t.csv: no task reads columns of it (mood: sentence; near: a, b), and"),
        ("t.csv", "sentence,a,b\nx,y,z\n", [], "t.csv: several tasks read columns of it"),
        ("t.csv", f"text,n\n{SECRET},1\n", ["nope"], "--text-columns nope: "),
        ("t.csv", f"Text;n\n{SECRET};1\n", ["text"], "--text-columns text: t.csv has no such column; it has Text, n"),
        ("t.csv", f"text,n\n{SECRET},1\n", ["3"], "--text-columns 3: "),
        ("t.csv", f"text,n\n{SECRET},1\n", ["1", "2", "1"], "--text-columns: found 3 columns; write one, or two"),
        ("t.csv", "", [], "t.csv: is empty; it needs a header line and texts"),
        ("t.csv", f"a,a\n{SECRET},1\n", ["1"], "t.csv, line 1: a column's name stands there twice"),
        ("t.jsonl", f'{{"sentence": "{SECRET}"}}\n{{"n": 1}}\n', [], "t.jsonl, line 2: has no text in column sentence"),
        ("t.jsonl", f'{{"sentence": "{SECRET}"}}\n["{SECRET}"]\n', [], "t.jsonl, line 2: is no JSON object"),
        ("t.jsonl", f'{{"sentence": "{SECRET}"}}\n{{"{SECRET}\n', [], "t.jsonl, line 2: bad JSON"),
        ("t.jsonl", '{"sentence": "x"}\n', ["1"], "--text-columns: "),
        ("t.txt", f"{SECRET}\n{SECRET}\tb\n", [], "t.txt, line 2: has 2 texts, the first line 1; give as many"),
        ("t.txt", "a\n", ["1"], "--text-columns: "),
        ("t.csv.gz", "no gzip", [], "t.csv.gz, line 1: broken gzip"),
        ("t.parquet.gz", "", [], "t.parquet.gz: parquet is compressed inside; unpack the file"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_without_its_texts(tmp_path, monkeypatch, name, content, columns, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as raised:
        rows_of(open_texts(text_files.Path(name), columns, TASKS))
    assert str(raised.value).startswith(error)
    assert SECRET not in str(raised.value)


def test_a_gzip_that_inflates_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "ALWAYS_INFLATED", 1000)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"sentence\n" + b"a\n" * 200_000))
    with pytest.raises(DataError, match="inflates to more than 100 times its size"):
        rows_of(open_texts(tmp_path / "t.csv.gz", [], TASKS))


ANSWERS = [Prediction("mood", "yes", None, {"no": 0.25, "yes": 0.75}), Prediction("near", None, 2.5, {})]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".tsv.gz", ".jsonl.gz"])
def test_answers_are_written_as_the_name_ends_and_can_be_read_again(tmp_path, ending):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"out{ending}"
    records = [{"line": n, **answer_columns(ANSWERS)} for n in range(3)]
    assert write_answers(path, iter([records[:2], records[2:]])) == 3
    table = read_table(path)
    assert table.columns == {
        "line": ["0", "1", "2"],
        "mood": ["yes"] * 3,
        "mood.no": ["0.25"] * 3,
        "mood.yes": ["0.75"] * 3,
        "near": ["2.5"] * 3,
    }
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_of_answers_appears_whole_or_not_at_all(tmp_path):
    path, other = tmp_path / "out.csv", tmp_path / "other.csv"
    other.write_text("mine")
    path.symlink_to(other)

    def failing():
        yield [{"line": 1}]
        raise DataError("t.csv, line 9: bad")

    with pytest.raises(DataError, match="line 9"):
        write_answers(path, failing())
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other.csv", "out.csv"]
    write_answers(path, iter([[{"line": 1}]]))
    assert (other.read_text(), path.is_symlink(), path.read_text()) == ("mine", False, "line\n1\n")
    with pytest.raises(DataError, match=r"a tab or a line's end in it, which a .tsv cannot hold; write .csv"):
        write_answers(tmp_path / "t.tsv", iter([[{"text": "a\tb"}]]))
    with pytest.raises(DataError, match="the name does not say what to write"):
        write_answers(tmp_path / "out.xlsx", iter(()))


def test_sentences_of_a_conll_file_are_texts_whose_words_are_known(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("# id 7\n-DOCSTART- O\n\n1 U.S. O\n2 # O\n\n\n1 so O\n")
    opened = open_texts(path, ["2"], TASKS)
    assert (opened.names, opened.unit) == (("text",), "line")
    (chunk,) = opened.chunks
    assert chunk.rows == [("U.S.\x1f#\x1f",), ("so\x1f",)]
    assert chunk.numbers == [4, 8]
    path.write_text("#fun\nso\n")
    assert next(iter(open_texts(path, [], TASKS).chunks)).rows == [("#fun\x1fso\x1f",)]


@pytest.mark.parametrize(
    ("content", "columns", "words"),
    [
        ("a O\n\nb\n", ["2"], "a.conll, line 3: has no word in column 2; leave a line blank to end a text"),
        ("a O\n", ["word"], "--text-columns: .*a.conll has words and tags in columns; write the number"),
        ("a O\n", ["1", "2"], "--text-columns: .*a.conll has words and tags in columns; write the number"),
        ("a O\n" * 5001, [], "line 5001: 5,000 words since line 1 without a blank line"),
    ],
)
def test_mistakes_in_a_conll_file_of_texts(tmp_path, content, columns, words):
    path = tmp_path / "a.conll"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        list(open_texts(path, columns, TASKS).chunks)
