import builtins
import gzip
import tracemalloc
from pathlib import Path

import pytest

from fedmtl.config.file import load_config
from fedmtl.errors import DataError
from fedmtl.tasks import sources
from fedmtl.tasks.examples import examples_from
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.resolve import resolve_task
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
    assert [table.location(row) for row in (0, 1)] == [f"{table.origin}, line 2", f"{table.origin}, line 5"]


def test_csv_holds_texts_longer_than_the_csv_modules_limit(tmp_path):
    table = read_table(write(tmp_path, "a.csv", f"text,label\n{'x' * 200_000},1\n"))
    assert len(table.columns["text"][0]) == 200_000


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", None], "score": [0.5, float("nan")]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.columns == {"text": ["a", ""], "score": ["0.5", ""]}
    assert table.location(1).endswith("a.parquet, row 2")


def test_parquet_without_pyarrow_names_the_package_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"needs pyarrow, .*'\.\[parquet\]'"):
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
        (
            "a.csv",
            "id\ttext, long\tlabel\n1\ta\t0\n",
            "3 columns by tabs and 2 by commas; write `source.deli",
        ),
    ],
)
def test_error_names_file_and_line(tmp_path, name, text, message):
    with pytest.raises(DataError) as error:
        read_table(write(tmp_path, name, text))
    assert message in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


CS224N = '\tid\tsentence\tsentiment\n0\t9d\tGood, bad and ""so on""\t3\n1\t0a\t"A ""quoted"" one"\t1.0\n'


def test_a_csv_whose_header_has_tabs_and_no_commas_is_read_by_tabs_and_says_so(tmp_path):
    table = read_table(write(tmp_path, "a.csv", CS224N))
    assert list(table.columns) == ["", "id", "sentence", "sentiment"]
    assert table.columns["sentence"] == ['Good, bad and ""so on""', 'A "quoted" one']
    assert table.note == "a.csv is separated by tabs, and is read so"
    assert read_table(write(tmp_path, "b.csv", "text,label\na\tb,1\n")).note == ""
    # A tab inside a quoted name separates nothing.
    assert list(read_table(write(tmp_path, "c.csv", '"the\ttext"\nx\n')).columns) == ["the\ttext"]


@pytest.mark.parametrize(
    ("name", "delimiter", "text"),
    [("a.csv", "tab", "a, or b\tc\n1\t2\n"), ("a.csv", ";", "a, or b;c\n1;2\n"), ("a.tsv", "|", "a, or b|c\n1|2\n"),
     ("a.tsv.gz", "semicolon", "a, or b;c\n1;2\n"), ("a.tsv", "tab", "a, or b\tc\n1\t2\n")],
)  # fmt: skip
def test_a_delimiter_that_is_given_is_taken(tmp_path, name, delimiter, text):
    table = read_table(write(tmp_path, name, text), delimiter)
    assert (table.columns, table.note) == ({"a, or b": ["1"], "c": ["2"]}, "")


def test_a_header_that_is_no_header_is_still_one_line(tmp_path):
    with pytest.raises(DataError, match=r"a.csv, line 1: bad csv"):
        read_table(write(tmp_path, "a.csv", '"' + "x\t" * (1 << 24) + "\n"))


def test_a_delimiter_is_for_csv_and_tsv(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl: has no delimiter; remove `source.delimiter`"):
        read_table(write(tmp_path, "a.jsonl", '{"a": 1}\n'), "tab")


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


def gzip_bomb(path: Path, megabytes: int) -> Path:
    block = b"text\tlabel\n" + b"\0" * ((1 << 20) - 11)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(megabytes):
            file.write(block)
    return path


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.csv.gz", "a.jsonl.gz", "a.txt.gz"])
def test_a_file_that_inflates_to_more_than_text_does_is_refused_on_the_way(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "ALWAYS_INFLATED", 1 << 20)
    path = gzip_bomb(tmp_path / name, 32)
    assert path.stat().st_size < 300_000
    tracemalloc.start()
    with pytest.raises(DataError, match="inflates to more than") as error:
        read_texts(path, ["text"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A hundred times the file, and the megabyte that went beyond it.
    assert peak < 101 * path.stat().st_size + (8 << 20)
    assert "\n" not in str(error.value)


def test_many_equal_lines_in_a_small_file_are_text(tmp_path):
    path = write(tmp_path, "a.tsv.gz", "text\tlabel\n" + "the same again\t1\n" * 200_000)
    assert 100 * path.stat().st_size < 200_000 * 17
    assert len(read_table(path)) == 200_000


def test_a_plain_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match="has more than 0 GB"):
        read_table(write(tmp_path, "a.tsv", "text\tlabel\n" + "a\t1\n" * 1000))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 2000 + "]" * 2000 + "}\n", "line 2: bad JSON (nested deeper than 64)"),
        ("a.jsonl", '{"a": ' + "[" * 500 + "]" * 500 + "}\n", "line 1: bad JSON (nested deeper than 64)"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}\n", "line 1: bad JSON (a number of thousands of digits)"),
        ("a.jsonl", "{}\n{}\n", "its objects have no keys"),
        ("a.jsonl", "".join(f'{{"a{n}": 1}}\n' for n in range(3000)), "has more than 1,000 columns"),
        ("a.tsv", "\t".join(f"a{n}" for n in range(100_000)) + "\n", "has more than 1,000 columns"),
        ("a.csv", "text,label\n" + '"' + "x" * (1 << 24) + ",1\nb,2\n", "line 2: bad csv (field larger than"),
        ("a.csv", "\n\r\n \n", "is empty"),
        ("a.tsv", "\r\n\r\n\x0b\n", "is empty"),
    ],
)
def test_a_bomb_in_plain_text_is_one_line(tmp_path, name, text, message):
    with pytest.raises(DataError) as error:
        read_table(write(tmp_path, name, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_dictionary_of_one_long_text_for_many_rows_is_refused_on_the_way(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = arrow.DictionaryArray.from_arrays(arrow.array([0] * 20_000, arrow.int32()), arrow.array(["x" * 10_000]))
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": rows.cast(arrow.string())}), path)
    # Two hundred megabytes of text in a few kilobytes.
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(sources, "MOST_BYTES", 64 << 20)
    with pytest.raises(DataError, match="inflates to more than"):
        read_table(path)


def test_what_a_parquet_file_says_of_its_size_is_believed_before_it_is_read(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [str(n) * 50 for n in range(5000)]}), path)
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match="holds more than"):
        read_table(path)


class TestSemicolons:
    def test_known_columns_say_what_separates_them(self, tmp_path):
        path = write(tmp_path, "a.csv", "text;label\nfine, or not;good\n")
        assert read_table(path, columns=("text", "label")).columns == {"text": ["fine, or not"], "label": ["good"]}
        by_commas = write(tmp_path, "b.csv", 'text,label\n"fine; or not",good\n')
        assert read_table(by_commas, columns=("text", "label")).columns["text"] == ["fine; or not"]

    def test_what_a_name_does_not_say_is_noted(self, tmp_path):
        known = {
            "a.csv": ("a;b\n1;2\n", "a.csv is separated by semicolons, and is read so"),
            "b.tsv": ("a\tb\n1\t2\n", ""),
            "c.tsv": ("a,b\n1,2\n", "c.tsv is separated by commas, and is read so"),
        }
        for name, (text, note) in known.items():
            table = read_table(write(tmp_path, name, text), columns=("a", "b"))
            assert (table.columns, table.note) == ({"a": ["1"], "b": ["2"]}, note)

    def test_a_run_reads_a_spreadsheets_export_by_its_columns(self, tmp_path):
        # As a spreadsheet writes it where a comma stands in numbers: a mark in front, semicolons, a line end in a text.
        path = tmp_path / "a.csv"
        path.write_bytes(
            '\ufeffReview ID;Review text;My verdict\r\n1;"fine, ""so""; or\nnot";good\r\n2;dull;bad\r\n'.encode()
        )
        task = (
            f"kind: classification, text: Review text, label: My verdict, source: {{train: {path}, validation: {path}}}"
        )
        data = load_tasks(load_config(None, [f"tasks={{mood: {{{task}}}}}"]))["mood"]
        assert data.train.texts == (['fine, "so"; or\nnot', "dull"],)
        assert data.origin == f"files in {tmp_path}; " + "; ".join(
            ["a.csv is separated by semicolons, and is read so"] * 2
        )

    @pytest.mark.parametrize("rows", ["fine, or not;good\n", "fine;good\n"])
    @pytest.mark.parametrize("header", ["text;label", "The text;The label?"])
    def test_without_them_the_message_says_what_to_write(self, tmp_path, header, rows):
        path = write(tmp_path, "a.csv", f"{header}\n{rows}")
        keys = f"kind: classification, text: text, label: label, source: {{train: {path}}}"
        task = resolve_task(load_config(None, [f"tasks.mood={{{keys}}}"]), "mood")
        with pytest.raises(DataError) as refused:
            examples_from(read_table(path), task)
        advice = "it looks separated by `;`: write `source.delimiter: ;`, or for check `--delimiter ';'`"
        assert str(refused.value).endswith(advice)
        assert "quoting" not in str(refused.value)
