"""What a study says of a cell is what stands in its run folder."""

import csv
import json
import shutil

import pytest

from fedmtl.config.file import config_from
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder
from fedmtl_studies.folder import settle
from fedmtl_studies.multitask_results import read_cell
from raw_events import raw_events

TASKS = ("sentiment", "similarity")


def mean(scores):
    return (scores["sentiment"]["accuracy"] + (scores["similarity"]["pearson"] + 1) / 2) / 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = {
        "mode": "centralized",
        "model": {"server_model": "random-1x32", "pool": "cls"},
        "tasks": {task: {"train_samples": 40, "val_samples": 24} for task in TASKS},
        "training": {"num_rounds": 3, "local_steps": 4, "batch_size": 8, "learning_rate": 1e-2},
        "compute": {"device": "cpu", "workers": 0},
        "output": str(tmp_path_factory.mktemp("study")),
    }
    done = start_run(config_from(settings), "cell")
    settle(done, 2, "all")
    return done


def test_scores_are_those_of_results_csv(run):
    with run.results.open() as file:
        rows = list(csv.DictReader(file))
    found = read_cell(run, mean)
    averages = [
        (float(row["sentiment.accuracy"]) + (float(row["similarity.pearson"]) + 1) / 2) / 2
        for row in rows
        if row["similarity.pearson"]
    ]
    assert found.final.average == pytest.approx(averages[-1])
    assert found.final.round == 3
    # round 0 is before training
    assert found.best.average == pytest.approx(max(averages[1:]))
    best = rows[found.best.round]
    assert found.best.scores["sentiment"]["accuracy"] == float(best["sentiment.accuracy"])
    assert found.losses[2]["sentiment"] == float(rows[2]["sentiment.train_loss"])


def test_the_budget_is_what_the_rounds_took(run):
    rounds = [event for event in raw_events(run) if event["event"] == "round"]
    budget = read_cell(run, mean).budget
    # 3 rounds of 4 steps of 8 examples
    assert (budget.steps, budget.examples) == (12, 96)
    assert budget.train_seconds == pytest.approx(sum(event["train_seconds"] for event in rounds))
    assert budget.evaluate_seconds == pytest.approx(sum(event["evaluate_seconds"] for event in rounds))
    assert (budget.device, budget.cells_at_once) == ("cpu", 2)


def test_sizes_are_those_of_the_model_folder(run):
    found = read_cell(run, mean)
    plan = next(event for event in raw_events(run) if event["event"] == "plan")
    assert found.trainable == found.parameters == plan["total"]
    assert found.trained_bytes == 4 * plan["total"]
    assert found.model_bytes == sum(path.stat().st_size for path in run.model.rglob("*") if path.is_file())
    assert found.labels["sentiment"] == ["negative", "positive"]


@pytest.mark.parametrize(("kind", "field", "what"), [("plan", "total", "parameters"), ("start", "device", "device")])
def test_a_run_that_did_not_record_what_is_needed_is_named(run, tmp_path, kind, field, what):
    older = RunFolder(tmp_path / "older")
    shutil.copytree(run.path, older.path)
    lines = raw_events(run)
    for line in lines:
        if line["event"] == kind:
            del line[field]
    older.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedmtlError, match=f"older/events.jsonl: says nothing of its {what}, .*; make the run again"):
        read_cell(older, mean)


def test_an_undefined_average_is_never_the_best(run):
    found = read_cell(run, lambda scores: None)
    assert found.final.average is None
    assert found.best.round == 1
