import gzip

import pytest

from fedmtl.errors import DataError
from fedmtl.tasks.sources import read_table
from fedmtl_studies.multitask import write_embedded, write_sentiment


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(("sentence\tlabel", *lines)).encode()))


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "sst5/train.tsv.gz", "so so\t2", "fine\t3")
    write(tmp_path / "sst5/dev.tsv.gz", "good\t4")
    write(tmp_path / "cfimdb/train.tsv.gz", "a long bad one\t0", "a long good one\t1")
    return tmp_path


def test_cfimdb_comes_after_sst_with_its_labels_on_the_same_scale(root):
    source = write_sentiment(root, root / "study/both.tsv")
    assert (root / "study/both.tsv").read_text().splitlines() == [
        "sentence\tlabel",
        "so so\t2",
        "fine\t3",
        "a long bad one\t0",
        "a long good one\t4",
    ]
    # scored on SST alone
    assert source == {"train": str(root / "study/both.tsv"), "validation": str(root / "sst5/dev.tsv.gz")}


def test_the_same_rows_leave_the_file_alone(root):
    target = root / "both.tsv"
    write_sentiment(root, target)
    before = target.stat().st_mtime_ns
    write_sentiment(root, target)
    assert target.stat().st_mtime_ns == before


def test_labels_that_cfimdb_does_not_have_are_named(root):
    write(root / "cfimdb/train.tsv.gz", "good\t1", "odd\t2")
    with pytest.raises(DataError, match="line 3: label '2' is not one of"):
        write_sentiment(root, root / "both.tsv")


def test_without_cfimdb_the_way_out_is_said(root):
    (root / "cfimdb/train.tsv.gz").unlink()
    with pytest.raises(DataError, match="--no-cfimdb"):
        write_sentiment(root, root / "both.tsv")


def test_embedded_texts_stand_in_for_every_file(tmp_path):
    write_embedded(tmp_path)
    sentiment = read_table(tmp_path / "sst5/train.tsv").columns
    strong = sentiment["sentence"].index(next(text for text in sentiment["sentence"] if " very " in text))
    assert sentiment["label"][strong] in ("0", "4")
    assert set(sentiment["label"]) == {"0", "1", "3", "4"}
    assert set(read_table(tmp_path / "cfimdb/train.tsv").columns["label"]) == {"0", "1"}
    for task, columns in (("qqp", 3), ("stsb", 3), ("sst5", 2)):
        assert len(read_table(tmp_path / task / "dev.tsv").columns) == columns
