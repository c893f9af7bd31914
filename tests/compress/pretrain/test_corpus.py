import gzip
import json

import pytest

from fedmtl.compress.pretrain.corpus import read_corpus
from fedmtl.errors import DataError


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_lines_and_every_text_column_but_labels_and_numbers(tmp_path):
    lines = write(tmp_path / "a.txt.gz", "one line\n\n  \nanother\n")
    table = write(
        tmp_path / "b.tsv", "id\tfirst\tsecond\tscore\tlabel\n7\ta text\tits pair\t0.5\tgood\n8\tb\t9\t1e3\tbad\n"
    )
    corpus = read_corpus([lines, table], 64, seed=0)
    assert corpus.texts == ["one line", "another", "a text", "b", "its pair", "9"]
    assert corpus.sources[1].columns == ("first", "second")
    assert [source.chunks for source in corpus.sources] == [2, 4]


def test_duplicates_are_dropped_across_files_and_spacings(tmp_path):
    first = write(tmp_path / "a.txt", "same  text\nsame text \n")
    second = write(tmp_path / "b.jsonl", json.dumps({"t": "same text"}) + "\n" + json.dumps({"t": "new"}) + "\n")
    corpus = read_corpus([first, second], 64, seed=0)
    assert corpus.texts == ["same text", "new"]
    assert [source.chunks for source in corpus.sources] == [1, 1]


def test_long_texts_become_chunks_of_all_lengths(tmp_path):
    words = [f"w{i}" for i in range(5000)]
    name = write(tmp_path / "a.txt", " ".join(words))
    corpus = read_corpus([name], 64, seed=0)
    assert " ".join(corpus.texts).split() == words
    lengths = [len(text.split()) for text in corpus.texts[:-1]]
    assert min(lengths) == 8
    # As many up to the geometric middle of 8 and 64 as above it.
    assert 0.3 < sum(length < 23 for length in lengths) / len(lengths) < 0.7
    assert 50 < max(lengths) <= 64
    assert read_corpus([name], 64, seed=0) == corpus
    assert read_corpus([name], 5000, seed=0).texts == [" ".join(words)]


def test_a_number_behind_a_file_draws_chunks_by_seed(tmp_path):
    path = write(tmp_path / "a.txt", "\n".join(f"text {i}" for i in range(50)))
    drawn = read_corpus([f"{path}=10"], 64, seed=1).texts
    assert len(drawn) == 10
    assert drawn == read_corpus([f"{path}=10"], 64, seed=1).texts
    assert drawn != read_corpus([f"{path}=10"], 64, seed=2).texts


def test_half_characters_do_not_break_it(tmp_path):
    corpus = read_corpus([write(tmp_path / "a.jsonl", '{"t": "odd \\ud83d end"}\n')], 64, seed=0)
    assert corpus.texts == ["odd \ufffd end"]
    assert corpus.digest()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", " \n\n", "holds no text"),
        ("a.tsv", "label\tscore\nx\t1\n", "has no column of texts"),
        ("a.tsv", "text\tlabel\n \t1\n", "has no column of texts"),
        ("a.doc", "x", "the name does not say what it holds"),
        ("a.txt.gz", None, "cannot be read"),
    ],
)
def test_files_without_texts_are_one_clear_line(tmp_path, name, text, words):
    path = tmp_path / name
    if text is None:
        path.write_bytes(b"no gzip")
    else:
        write(path, text)
    with pytest.raises(DataError, match=words) as error:
        read_corpus([str(path)], 64, seed=0)
    assert "\n" not in str(error.value)


def test_a_missing_file_or_a_bad_number_is_said(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_corpus([str(tmp_path / "gone.txt")], 64, seed=0)
    with pytest.raises(DataError, match="no number above 0"):
        read_corpus([str(tmp_path / "gone.txt=many")], 64, seed=0)


def test_rows_of_two_text_columns_are_pairs_too(tmp_path):
    table = write(tmp_path / "a.tsv", "one\ttwo\tlabel\na  text\tits pair\t1\nb\t\t0\na text\tits pair\t0\n")
    corpus = read_corpus([table], 64, seed=0, pairs=True)
    assert corpus.texts == ["a text", "b", "its pair", ("a text", "its pair")]
    assert corpus.digest() != read_corpus([table], 64, seed=0).digest()


def test_each_text_of_a_pair_is_cut_to_half_a_chunk(tmp_path):
    table = write(tmp_path / "a.tsv", "one\ttwo\n" + " ".join("abcdef") + "\tx y\n")
    assert read_corpus([table], 8, seed=0, pairs=True).texts[-1] == ("a b c d", "x y")


def test_pairs_of_files_without_two_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match="--pairs: no file of --corpus has two columns"):
        read_corpus([write(tmp_path / "a.txt", "one line\n")], 64, seed=0, pairs=True)
