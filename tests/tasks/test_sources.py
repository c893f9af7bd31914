import builtins
import gzip
from pathlib import Path

import pytest

from fedmtl.errors import DataError
from fedmtl.tasks.sources import find_table, read_table, read_texts


def write(folder: Path, name: str, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'text,label\n"one, ""two""",1\nthree,0\n'),
        ("a.tsv", 'text\tlabel\none, "two"\t1\nthree\t0\n'),
        ("a.tsv", 'text\tlabel\r\none, "two"\t1\r\n\r\nthree\t0'),
        ("a.jsonl", '{"text": "one, \\"two\\"", "label": 1}\n\n{"text": "three", "label": 0}\n'),
    ],
)
def test_same_rows_from_every_kind_of_file(tmp_path, name, text, suffix):
    table = read_table(write(tmp_path, name + suffix, text))
    assert table.columns == {"text": ['one, "two"', "three"], "label": ["1", "0"]}
    assert len(table) == 2


def test_tsv_takes_quotes_and_unicode_line_separators_as_text(tmp_path):
    table = read_table(write(tmp_path, "a.tsv", 'text\tlabel\n"open\u2028quote\t1\n'))
    assert table.columns["text"] == ['"open\u2028quote']


def test_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    assert "text" in read_table(write(tmp_path, "a.csv", "\ufefftext,label\na,1\n")).columns


def test_missing_values_of_jsonl_are_empty_and_truth_values_json(tmp_path):
    table = read_table(write(tmp_path, "a.jsonl", '{"a": null, "b": 1.5}\n{"b": true, "c": "x"}\n'))
    assert table.columns == {"a": ["", ""], "b": ["1.5", "true"], "c": ["", "x"]}


def test_place_counts_lines_inside_quoted_texts(tmp_path):
    # Line 1 is the header, the first text covers lines 2 and 3, line 4 is blank.
    table = read_table(write(tmp_path, "a.csv", 'text,label\n"one\ntwo",1\n\nthree,0\n'))
    assert [table.place(row) for row in (0, 1)] == [f"{table.origin}, line 2", f"{table.origin}, line 5"]


def test_csv_holds_texts_longer_than_the_csv_modules_limit(tmp_path):
    table = read_table(write(tmp_path, "a.csv", f"text,label\n{'x' * 200_000},1\n"))
    assert len(table.columns["text"][0]) == 200_000


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", None], "score": [0.5, float("nan")]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.columns == {"text": ["a", ""], "score": ["0.5", ""]}
    assert table.place(1).endswith("a.parquet, row 2")


def test_parquet_without_pyarrow_names_the_package_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"pip install fedmtl\[parquet\]"):
        read_table(write(tmp_path, "a.parquet", b"PAR1"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv: is empty"),
        ("a.jsonl", "\n\n", "a.jsonl: is empty"),
        ("a.tsv", "text\tlabel\n", "no examples"),
        ("a.tsv", "text\tlabel\na\t1\nb\n", "line 3: has 1 values, the header 2 (text, label)"),
        ("a.csv", "text,label\na,b,1\n", "line 2: has 3 values, the header 2"),
        ("a.csv", "text,text\na,b\n", "column 'text' stands there twice"),
        ("a.csv", 'text,label\na,1\n"b,1\n', "line 3: bad csv"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: bad JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2: is no JSON object"),
        ("a.tsv", b"text\tlabel\na\t1\n\xff\t0\n", "line 3: is not UTF-8"),
        ("a.parquet", b"nothing of the kind", "cannot be read as parquet"),
        ("a.txt", "text", "a.txt: the name does not say what it holds"),
    ],
)
def test_error_names_file_and_line(tmp_path, name, text, message):
    with pytest.raises(DataError) as error:
        read_table(write(tmp_path, name, text))
    assert message in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.tsv: no such file"):
        read_table(tmp_path / "gone.tsv")


def test_broken_gzip_is_named(tmp_path):
    whole = gzip.compress(b"text\tlabel\n" + b"a\t1\n" * 10)
    for name, data in {"cut.tsv.gz": whole[:-12], "none.tsv.gz": b"text\tlabel\n"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}, line \d+: broken gzip"):
            read_table(tmp_path / name)


def test_find_table_takes_the_first_stem_that_has_a_file(tmp_path):
    write(tmp_path, "validation.csv", "a\n1\n")
    write(tmp_path, "dev.txt", "not a table")
    assert find_table(tmp_path, ["dev", "validation"]) == tmp_path / "validation.csv"
    assert find_table(tmp_path, ["train"]) is None


def test_texts_without_labels_come_from_lines_or_columns(tmp_path):
    lines = write(tmp_path, "a.txt.gz", "one\n\n two \r\nthree\u2028four\n")
    assert read_texts(lines, ["text"]) == (["one", " two ", "three\u2028four"],)
    assert read_texts(lines, ["a", "b"]) is None
    pairs = write(tmp_path, "b.csv", "q,r\nx,y\n,z\nv,w\n")
    assert read_texts(pairs, ["a", "b"]) == (["x", "v"], ["y", "w"])
    assert read_texts(pairs, ["text"]) == (["x", "v"],)
    named = write(tmp_path, "c.tsv", "label\tb\ta\n1\ty\tx\n")
    assert read_texts(named, ["a", "b"]) == (["x"], ["y"])
    assert read_texts(named, ["a", "other"]) is None
    with pytest.raises(DataError, match="no such file"):
        read_texts(tmp_path / "none.txt", ["text"])
