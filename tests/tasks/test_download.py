"""A dataset becomes files that the printed config reads; a folder with csv files stands in for the hub."""

import csv

import pytest
import yaml

from fedmtl.config.file import config_from
from fedmtl.errors import ConfigError, DataError
from fedmtl.tasks import download as download_module
from fedmtl.tasks.download import Wanted, download
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.sources import Table, read_table

REVIEWS = [("a fine film", "1"), ('so dull, so "long"', "0"), ("good plot\nand actors", "1"), ("bad it is", "0")]


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """A dataset as the hub library loads it from a folder, with a test split."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "reviews"
    folder.mkdir()
    for split, rows in (("train", REVIEWS * 3), ("test", REVIEWS[:2])):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("id", "words", "label"), *((n, *row) for n, row in enumerate(rows))])
    return folder


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_the_printed_config_reads_what_was_written(reviews, tmp_path, format):
    fetched = download(Wanted(str(reviews), format=format), tmp_path / "out")
    train, test = (tmp_path / "out" / "reviews" / f"{name}.{format}" for name in ("train", "test"))
    assert fetched.files == {train: 12, test: 2}
    assert read_table(test).columns == {
        "id": ["0", "1"], "words": [text for text, _ in REVIEWS[:2]], "label": ["1", "0"],
    }  # fmt: skip
    config = config_from(yaml.safe_load(fetched.snippet))
    (data,) = load_tasks(config).values()
    assert (data.task.kind, data.task.text, data.task.labels) == ("classification", ("words",), ("0", "1"))
    # No validation split: a tenth, at least one, is cut from train, and the test file is left alone. There are four
    # texts, each three times, and equal ones stay together.
    assert (len(data.train), len(data.validation), data.validation_cut) == (9, 3, True)
    assert "test: no run reads it" in fetched.remarks[-1]


def fake_hub(monkeypatch, splits):
    """The hub's splits, in place of the library that fetches them."""
    read = []

    def read_hub(source, split, *, task):
        read.append((source.hub, source.subset, split))
        return Table(splits[split], f"hub {source.hub} {split}")

    monkeypatch.setattr(download_module, "hub_splits", lambda source: list(splits))
    monkeypatch.setattr(download_module, "read_hub", read_hub)
    return read


def test_a_built_in_task_gets_its_own_names_and_stands_under_the_data_root(monkeypatch, tmp_path):
    pairs = {"question1": ["a b", ""], "question2": ["c d", "e f"], "label": ["1", "0"], "idx": ["0", "1"]}
    read = fake_hub(monkeypatch, {"train": pairs, "validation": pairs, "test": {**pairs, "label": ["-1", "-1"]}})
    fetched = download(Wanted("qqp"), tmp_path)
    assert read == [("nyu-mll/glue", "qqp", split) for split in ("train", "validation", "test")]
    assert read_table(tmp_path / "qqp" / "validation.jsonl").columns == {
        "sentence1": ["a b"], "sentence2": ["c d"], "label": ["1"], "idx": ["0"],
    }  # fmt: skip
    assert "train: 1 rows without text are left out" in fetched.remarks
    assert "test: its labels are not public, so that nothing can be scored on it" in fetched.remarks
    (data,) = load_tasks(config_from(yaml.safe_load(fetched.snippet))).values()
    assert (data.task.name, len(data.train), len(data.validation)) == ("qqp", 1, 1)


def test_scores_become_a_regression(monkeypatch, tmp_path):
    fake_hub(monkeypatch, {"train": {"text": ["a b", "c d"], "score": ["0.5", "3"]}})
    config = config_from(yaml.safe_load(download(Wanted("owner/scores"), tmp_path).snippet))
    assert (config.tasks["scores"].kind, config.tasks["scores"].score_range) == ("regression", (0.5, 3.0))


def test_a_file_that_is_there_is_not_written_over(monkeypatch, tmp_path):
    fake_hub(monkeypatch, {"train": {"text": ["a b"], "label": ["x"]}})
    download(Wanted("owner/texts"), tmp_path)
    with pytest.raises(DataError, match=r"train.jsonl: is there already; remove it, or name another folder"):
        download(Wanted("owner/texts"), tmp_path)


@pytest.mark.parametrize(
    ("given", "columns", "words"),
    [
        ({}, {"text": ["a b"], "mood": ["x"]}, "--label: which column of hub owner/texts train has the labels"),
        ({"label": "mood"}, {"a": ["a b"], "b": ["a b"], "c": ["a b"], "mood": ["x"]}, "--text: 3 columns look like"),
        ({"text": ("other",)}, {"text": ["a b"], "label": ["x"]}, "--text: found other in hub owner/texts train"),
        ({"name": "sentiment"}, {}, "data get: sentiment is in the package, not on the hub"),
        ({"name": "sst2", "label": "mood"}, {}, "--label: sst2 is a built-in task, whose columns are known"),
    ],
)
def test_what_cannot_be_known_is_one_line(monkeypatch, tmp_path, given, columns, words):
    fake_hub(monkeypatch, {"train": columns})
    with pytest.raises(ConfigError, match=words):
        download(Wanted(**{"name": "owner/texts", **given}), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_dataset_without_a_training_split_says_what_it_has(monkeypatch, tmp_path):
    fake_hub(monkeypatch, {"full": {"text": ["a b"], "label": ["x"]}})
    with pytest.raises(DataError, match="hub owner/texts: has no split called train; it has full"):
        download(Wanted("owner/texts"), tmp_path)
