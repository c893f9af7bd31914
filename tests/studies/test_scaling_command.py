"""The study from its command to its page, with as few steps as can be."""

import time
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from fedmtl.config.file import load_config
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events
from studies.csv_rows import read_csv

SMALLEST = (
    "--quick", "--tasks", "sentiment", "--examples", "16", "--validation", "20", "--rounds", "1", "--set",
    "compute.device=cpu",
)  # fmt: skip


@pytest.fixture
def study(command):
    return partial(command, "scaling")


def test_tables_are_made_of_run_folders_and_made_again_without_running(study, tmp_path):
    arguments = (*SMALLEST, "--clients", "1,4", "--encoders", "random:tiny", "--keep", "scores")
    code, _, err = study(*arguments)
    assert code == 0, err
    folder = tmp_path / "runs/scaling-quick"
    run = RunFolder(folder / "cells/random-tiny-sentiment-4-seed0")
    scored = {e["round"]: e["metrics"]["accuracy"] for e in raw_events(run) if e["event"] == "evaluation"}
    found = {row["clients"]: row for row in read_csv(folder / "table1.csv")}
    row = found["4"]
    # 16 examples are 4 for each of 4 clients: a step, twice; the threshold is twice the round
    assert (row["examples"], row["steps"], row["last_round"]) == ("4", "2", "2")
    assert float(row["accuracy"]) == pytest.approx(scored[1])
    assert float(row["last_accuracy"]) == pytest.approx(scored[2])
    assert load_config(run.config).model.initial == "random"
    assert not (run.model / "weights.safetensors").exists()
    curves = [row for row in read_csv(folder / "curves.csv") if row["clients"] == "1"]
    assert [row["round"] for row in curves] == ["0", "1"]
    assert len(read_csv(folder / "cells.csv")) == 2
    body = (folder / "study.html").read_text()
    page = ElementTree.fromstring(body[body.index("<main") : body.index("</main>") + len("</main>")])
    # figures 1, 2 and 3 of the one task and encoder
    assert len(page.findall(".//svg")) == len(list((folder / "figures").iterdir())) == 3
    assert "sentiment: trained on 16 examples, scored on 20 rows of the validation split." in body
    assert "random:tiny on sentiment: " in (folder / "study.md").read_text()
    before = run.events.stat().st_mtime_ns
    code, out, _ = study(*arguments)
    assert code == 0
    assert "2 of 2 cells were finished before" in out
    assert run.events.stat().st_mtime_ns == before


def test_options_that_cannot_be_are_named(study):
    assert "--rows: no setup fits none*" in study(*SMALLEST, "--clients", "1", "--rows", "none*")[2]
    assert "--preset paper: --quick has settings of its own" in study("--quick", "--preset", "paper")[2]
    assert "--clients: found two" in study("--quick", "--clients", "two")[2]


@pytest.mark.slow
def test_the_quick_grid_has_every_row_within_three_minutes(study, tmp_path):
    started = time.monotonic()
    code, _, err = study("--quick")
    assert code == 0, err
    assert time.monotonic() - started < 180
    found = read_csv(tmp_path / "runs/scaling-quick/table1.csv")
    # 2 tasks, 2 encoders, 6 numbers of clients
    assert [bool(row["accuracy"]) for row in found] == [True] * 24
    assert len(list((tmp_path / "runs/scaling-quick/figures").iterdir())) == 8
