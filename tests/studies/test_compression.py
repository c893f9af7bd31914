"""The study from its command to its page, with as few steps as can be."""

import csv
import json
import time
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from fedmtl.compress.measure.variants import Measured, Timing
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.runs.folder import RunFolder
from fedmtl_studies.compression import CompressionOptions, open_base, plan, read_shape
from fedmtl_studies.compression_setups import Shape
from fedmtl_studies.folder import open_study
from raw_events import raw_events

SMALLEST = (
    "--quick", "--encoder", "random-2x64", "--teacher-epochs", "1", "--epochs-prediction", "1", "--set",
    "compute.device=cpu", "--set", "tasks.sst2.train_samples=16", "--tasks", "sst2",
)  # fmt: skip


@pytest.fixture
def study(command):
    return partial(command, "compression")


@pytest.fixture
def timed(monkeypatch):
    """Measures without measuring; the calls that were made."""
    calls = []

    def measure(variants, load, *, scores):
        calls.append([variant.name for variant in variants])
        return [Measured(one, 100, 50, 7, 9, 11, (Timing(1, 0.01, 0.02, 100.0),), None) for one in variants]

    monkeypatch.setattr("fedmtl_studies.computing.measure", measure)
    monkeypatch.setattr("fedmtl_studies.compression_results.has_onnx", lambda: False)
    return calls


def read_table(folder, number):
    with (folder / f"table{number}.csv").open() as file:
        return {row["setup"]: row for row in csv.DictReader(file)}


def last_score(run):
    return [event for event in raw_events(run) if event["event"] == "evaluation"][-1]["metrics"]["accuracy"]


def test_rows_are_run_after_their_teacher_and_measured_in_the_end(study, timed, tmp_path):
    rows = ("--rows", "1x64-uniform-teacher,1x64-labels,1x32-uniform,prune-20,ffn-50,whole")
    code, out, err = study(*SMALLEST, *rows, "--keep", "scores")
    assert code == 0, err
    folder = tmp_path / "runs/compression-quick"
    cells = {path.name: RunFolder(path) for path in (folder / "cells").iterdir()}
    names = ("1x32-uniform", "1x64-labels", "1x64-uniform-teacher", "ffn-50", "prune-20", "teacher", "whole")
    assert sorted(cells) == [f"{name}-seed0" for name in names]
    student, teacher = (last_score(cells[f"{name}-seed0"]) for name in ("1x64-uniform-teacher", "teacher"))
    row = read_table(folder, 1)["1x64-uniform-teacher"]
    assert float(row["sst2_accuracy"]) == pytest.approx(student)
    assert float(row["sst2_retention"]) == pytest.approx(student / teacher)
    assert float(read_table(folder, 5)["prune-20"]["zeros_linear"]) == pytest.approx(0.2, abs=0.01)
    assert list(read_table(folder, 6)) == ["1x64-labels", "1x64-uniform-teacher"]
    start = load_config(cells["whole-seed0"].config).model.start_from
    assert start == str(cells["teacher-seed0"].path)
    assert timed == [["teacher", "1x32-uniform"]]
    assert not (cells["teacher-seed0"].model / "weights.safetensors").exists()
    text = (folder / "study.md").read_text()
    assert "is not installed here: rows of ONNX files are left out" in text
    body = (folder / "study.html").read_text()
    ElementTree.fromstring(body[body.index("<main") : body.index("</main>") + len("</main>")])
    assert ElementTree.parse(folder / "figures/retention.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    # nothing is run or measured twice, and what was measured is shown without measuring
    code, out, err = study(*SMALLEST, *rows, "--keep", "scores")
    assert code == 0, err
    assert "7 of 7 cells were finished before" in out
    code, _, _ = study(*SMALLEST, *rows, "--keep", "scores", "--no-run", "--no-measure")
    assert code == 0
    assert len(timed) == 1
    assert "| teacher | fedmtl |" in (folder / "study.md").read_text()
    # the page still says what the cells were to be
    assert "runs: true" in (folder / "study.yaml").read_text()
    assert "runs: true" in (folder / "study.html").read_text()


def test_a_finished_run_can_be_the_teacher_of_every_seed(study, tmp_path):
    common = (*SMALLEST[:-2], "--no-measure")
    code, _, err = study(*common, "--tasks", "sst2", "--rows", "whole", "--name", "first")
    assert code == 0, err
    above = tmp_path / "runs/first/cells/teacher-seed0"
    code, _, err = study(
        "--quick", "--teacher", str(above), "--rows", "1x32-top", "--seeds", "0,1", "--epochs-prediction", "1",
        "--no-measure", "--name", "second",
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "runs/second"
    assert sorted(path.name for path in (folder / "cells").iterdir()) == ["1x32-top-seed0", "1x32-top-seed1"]
    made = json.loads((folder / "made/1x32-top-seed1.json").read_text())
    assert made["distilled"] == str(above)
    teacher = last_score(RunFolder(above))
    scores = [last_score(RunFolder(folder / f"cells/1x32-top-seed{seed}")) for seed in (0, 1)]
    row = read_table(folder, 1)["1x32-top"]
    assert float(row["sst2_retention"]) == pytest.approx(sum(scores) / 2 / teacher)


def test_single_task_teachers_are_off_unless_named(tmp_path):
    folder = open_study(tmp_path, "study")

    def names(**more):
        return [cell.name for cell in plan(CompressionOptions(quick=True, **more), folder).cells]

    assert not any(name.startswith("single") for name in names())
    assert names(rows="single-qqp*") == ["single-qqp-seed0", "single-qqp-1x128-seed0"]
    assert "single-stsb-1x128-seed0" in names(tables=(7,))
    # the teacher has the seeds of what it teaches
    several = names(rows="1x64-top,tiny", seeds=(0, 1), seed_rows="tiny")
    assert several == ["teacher-seed0", "1x64-top-seed0", "tiny-seed0", "teacher-seed1", "tiny-seed1"]


def test_tasks_are_those_found_in_the_data(tmp_path):
    for task in ("rte", "sst2", "other"):
        (tmp_path / f"data/{task}").mkdir(parents=True)
        (tmp_path / f"data/{task}/train.tsv").write_text("sentence\tlabel\n")
    folder = open_study(tmp_path, "study")
    assert list(open_base(CompressionOptions(data=str(tmp_path / "data")), folder).metrics) == ["sst2", "rte"]
    with pytest.raises(ConfigError, match="has none of sst2"):
        open_base(CompressionOptions(data=str(tmp_path / "nowhere")), folder)


def test_a_shape_is_read_from_the_encoders_config():
    assert read_shape("tiny") == Shape(2, 128)
    assert read_shape("random-4x96") == Shape(4, 96)


@pytest.mark.slow
def test_the_quick_grid_has_every_row_within_three_minutes(study, tmp_path):
    started = time.monotonic()
    code, _, err = study("--quick", "--tables", "1,2,3,4,5,6,7")
    assert code == 0, err
    assert time.monotonic() - started < 180
    folder = tmp_path / "runs/compression-quick"
    for number, count in ((1, 20), (3, 9), (4, 18), (5, 8), (6, 5)):
        found = [row for setup, row in read_table(folder, number).items() if setup]
        assert [bool(row["sst2_accuracy"]) for row in found] == [True] * count
    with (folder / "table2.csv").open() as file:
        assert [row["form"] for row in csv.DictReader(file)][:3] == ["fedmtl", "ONNX", "INT8 ONNX"]
