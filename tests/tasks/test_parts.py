"""Which rows of files, folders and configs are looked over, and as whose."""

import pytest

from fedmtl.config import Config
from fedmtl.errors import DataError
from fedmtl.tasks.check import check_parts
from fedmtl.tasks.parts import config_parts, file_parts
from tasks.small_files import ROWS, config_of, write


def test_files_of_one_folder_are_splits_and_others_are_clients(tmp_path):
    for name in ("train.tsv", "my_dev.tsv", "test.tsv"):
        write(tmp_path / "a" / name, ROWS)
    splits = file_parts([tmp_path / "a"])
    assert [(each.split, each.client) for each in splits] == [("validation", ""), ("test", ""), ("train", "")]
    for name in ("north.tsv", "south.tsv"):
        write(tmp_path / "b" / name, ROWS)
    clients = file_parts([tmp_path / "b" / "north.tsv", tmp_path / "b" / "south.tsv"])
    assert [(each.split, each.client) for each in clients] == [("train", "north"), ("train", "south")]
    assert check_parts(clients).tasks[0].between_clients == len(ROWS)


def test_a_folder_of_a_built_in_task_has_its_columns(tmp_path):
    write(tmp_path / "qqp" / "train.tsv", [("a", "b", "0", "9")], "sentence1\tsentence2\tlabel\tid")
    (found,) = file_parts([tmp_path])
    assert (found.task, found.text, found.label, found.is_named) == ("qqp", ("sentence1", "sentence2"), "label", False)


def test_columns_of_other_names_are_guessed_or_named(tmp_path):
    rows = [(str(number), f"some words of line {number}", "good" if number % 2 else "bad") for number in range(20)]
    path = write(tmp_path / "a.tsv", rows, "id\tremark\tmood")
    (guessed,) = file_parts([path])
    assert (guessed.text, guessed.label, guessed.is_named) == (("remark",), "mood", False)
    (named,) = file_parts([path], ["id"], "remark")
    assert (named.text, named.label, named.is_named) == (("id",), "remark", True)
    with pytest.raises(DataError, match="has no column title; it has id, remark, mood"):
        file_parts([path], ["title"])


def test_a_config_gives_the_parts_of_its_clients(tmp_path):
    config = config_of(
        tmp_path, north=write(tmp_path / "n.tsv", ROWS), south=write(tmp_path / "s.tsv", [*ROWS[:1], ROWS[2]])
    )
    found = check_parts(config_parts(config))
    assert [(part.client, part.rows) for part in found.parts] == [("north", 4), ("south", 2)]
    assert found.tasks[0].between_clients == 2
    assert {warning.code for warning in found.warnings} == {"one_class", "between_clients"}


def test_a_missing_column_of_a_config_is_an_error_without_the_data(tmp_path):
    config = config_of(tmp_path, north=write(tmp_path / "n.tsv", ROWS, "a whole text\tx"))
    with pytest.raises(DataError, match=r"has no column text, which tasks.mood names; it has column 1, column 2"):
        config_parts(config)


def test_tagged_files_are_looked_over_by_the_types_of_their_spans(tmp_path):
    (tmp_path / "train.conll").write_text("Ada\tB-PER\nin\tO\nYork\tB-LOC\n\nso\tO\n\nAda\tB-PER\n\nAda\tB-LOC\n")
    (tmp_path / "dev.jsonl").write_text('{"text": "Ada sang", "label": [[0, 3, "PER"]]}\n')
    found = check_parts(file_parts([tmp_path / "train.conll", tmp_path / "dev.jsonl"]))
    train, dev = found.parts
    # Every label occurs twice here, in four texts of which one has none.
    assert (train.labels, train.rows, train.missing_labels, train.repeated) == ({"PER": 2, "LOC": 2}, 4, 0, 1)
    assert (train.text, train.label, train.split, dev.split) == (["tokens"], "tags", "train", "validation")
    assert train.words[-1] == 3
    codes = {finding.code for finding in found.warnings}
    # One text has other tags each time; that all have one label, or one most of it, is nothing here.
    assert "conflicting" in codes
    assert not codes & {"one_class", "imbalance", "no_label", "no_header"}


def test_tags_that_a_config_does_not_know_are_counted(tmp_path):
    (tmp_path / "train.conll").write_text("Ada\tB-PER\n\nYork\tB-LOC\n")
    task = {"kind": "tagging", "labels": ["PER"], "source": {"train": str(tmp_path / "train.conll")}}
    found = check_parts(config_parts(Config.model_validate({"tasks": {"names": task}})))
    unknown = next(finding for finding in found.warnings if finding.code == "label_unknown")
    assert "1 example has a label that is not in tasks.names.labels, the first in line 3" in unknown.words
