"""The study from its command to its page, with as few steps as can be."""

import csv
import time
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from fedmtl.runs.folder import RunFolder
from fedmtl_studies.multitask import rows
from raw_events import raw_events

SMALLEST = ("--quick", "--epochs", "1", "--steps", "3", "--batch-size", "2", "--set", "compute.device=cpu")


@pytest.fixture
def study(command):
    return partial(command, "multitask")


@pytest.mark.slow
def test_a_table_is_made_of_run_folders_and_made_again_without_running(study, tmp_path):
    code, out, err = study(*SMALLEST, "--tables", "5,7", "--set", "model.server_model=random-2x48")
    assert code == 0, err
    folder = tmp_path / "runs/multitask-quick"
    with (folder / "table5.csv").open() as file:
        found = {row["configuration"]: row for row in csv.DictReader(file)}
    runs = {name: RunFolder(folder / f"cells/{name}-seed0") for name in ("epoch", "single-similarity")}
    for words, name in (("Baseline Finetune Multitask", "epoch"), ("Baseline Finetune STS", "single-similarity")):
        row, last = found[words], _last_scores(runs[name])
        sst, para, sts = last["sst5"]["accuracy"], last["qqp"]["accuracy"], last["stsb"]["pearson"]
        assert float(row["sst5_accuracy"]) == pytest.approx(sst)
        assert float(row["average"]) == pytest.approx((sst + para + (sts + 1) / 2) / 3)
        assert (row["steps"], row["examples"]) == ("3", "6")
    trained = [event["tasks"] for event in raw_events(runs["single-similarity"]) if event["event"] == "update"]
    assert all(list(tasks) == ["stsb"] for tasks in trained)
    body = (folder / "study.html").read_text()
    assert ElementTree.fromstring(body[body.index("<main") : body.index("</main>") + len("</main>")]).findall(".//svg")
    assert ElementTree.parse(folder / "figures/figure6-sst5.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "### Table 7" in (folder / "study.md").read_text()
    before = {name: run.events.stat().st_mtime_ns for name, run in runs.items()}
    code, out, _ = study(*SMALLEST, "--tables", "5,7", "--set", "model.server_model=random-2x48")
    assert code == 0
    assert "cells were finished before" in out
    assert {name: run.events.stat().st_mtime_ns for name, run in runs.items()} == before


def _last_scores(run):
    return {event["task"]: event["metrics"] for event in raw_events(run) if event["event"] == "evaluation"}


def test_a_cell_that_fails_is_said_at_the_end_and_on_the_page(study, tmp_path):
    code, out, err = study(*SMALLEST, "--tables", "7", "--set", "training.bogus=1", "--name", "broken")
    assert code == 3
    assert "1 of 2: epoch-seed0 failed: training." in out
    assert "unknown key" in out
    assert "error: 2 of 2 cells failed (epoch-seed0, combined-1-seed0); the reason of the first: training." in err
    page = (tmp_path / "runs/broken/study.html").read_text()
    assert "combined-1-seed0 failed: " in page
    assert "0 of 2 cells are finished, 2 failed" in page


def test_only_rows_that_are_named_are_run_and_shown(study, tmp_path):
    code, _, err = study(*SMALLEST, "--rows", "epoch,random", "--set", "model.server_model=random-1x32")
    assert code == 0, err
    folder = tmp_path / "runs/multitask-quick"
    assert sorted(path.name for path in (folder / "cells").iterdir()) == ["epoch-seed0", "random-seed0"]
    # 5 has `epoch`, 6 `random` and 7 `epoch`; the others have neither
    assert sorted(path.name for path in folder.glob("table*.csv")) == ["table5.csv", "table6.csv", "table7.csv"]
    assert len((folder / "table5.csv").read_text().splitlines()) == 2


def test_words_among_numbers_are_named(study):
    code, _, err = study("--quick", "--seeds", "one")
    assert code == 2
    assert "error: --seeds: found one; write whole numbers" in err


def test_a_run_is_no_study(study, tmp_path):
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/config.yaml").touch()
    code, _, err = study("--quick", "--name", "first")
    assert code == 2
    assert "is a run, not a study" in err


@pytest.mark.slow
def test_the_quick_grid_has_every_row_within_three_minutes(study, tmp_path):
    started = time.monotonic()
    code, _, err = study("--quick")
    assert code == 0, err
    assert time.monotonic() - started < 180
    for number, listed in rows((1, 2, 3, 4, 5, 6, 7), has_cfimdb=True).items():
        with (tmp_path / f"runs/multitask-quick/table{number}.csv").open() as file:
            found = list(csv.DictReader(file))
        key = "mse" if number == 7 else "average"
        assert [bool(row[key]) for row in found[: len(listed)]] == [True] * len(listed)
