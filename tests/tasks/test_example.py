"""The example of the tutorial: files and a config that load, and no text of a test file in train."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from fedmtl.config.file import load_config
from fedmtl.errors import DataError
from fedmtl.tasks.example import CLIENTS, CONFIG, NUM_ROWS, TASKS, write_example


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "example"
    write_example(folder)
    return folder


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_the_config_names_tasks_files_and_clients_and_nothing_else(folder):
    config = load_config(folder / CONFIG)
    assert list(config.tasks) == list(TASKS)
    assert {name: tuple(client.tasks) for name, client in config.clients.items()} == CLIENTS
    assert yaml.safe_load((folder / CONFIG).read_text()).keys() == {"tasks", "clients"}


@pytest.mark.parametrize("task", TASKS)
def test_files_have_their_rows_and_share_no_text(folder, task):
    tables = {split: read(folder / f"{task}-{split}.csv") for split in ("train", "validation", "test")}
    assert {table[0] == list(TASKS[task].columns) for table in tables.values()} == {True}
    assert {split: len(tables[split]) - 1 for split in NUM_ROWS} == NUM_ROWS
    texts = [tuple(row[:-1]) for table in tables.values() for row in table[1:]]
    assert len(set(texts)) == len(texts)


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "reviews-train.csv").write_text("mine")
    with pytest.raises(DataError, match="is there already"):
        write_example(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reviews-train.csv"]
    assert (tmp_path / "reviews-train.csv").read_text() == "mine"
