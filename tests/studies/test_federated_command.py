"""The study from its command to its page, with as few steps as can be."""

import time
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from fedmtl.runs.folder import RunFolder
from fedmtl_studies.federated_results import MODES
from raw_events import raw_events
from studies.csv_rows import read_csv
from studies.test_federated import OWN

SMALLEST = (
    "--quick", "--encoder", "random-1x32", "--rounds", "1", "--jobs", "1", "--set", "compute.device=cpu", "--set",
    "compute.workers=0", "--set", "tasks.similarity.val_samples=12",
)  # fmt: skip


@pytest.fixture
def study(command):
    return partial(command, "federated")


def last_evaluations(run):
    return {event["task"]: event for event in raw_events(run) if event["event"] == "evaluation"}


def test_modes_are_runs_on_the_same_examples_and_clients_are_compared_with_the_shared_model(study, tmp_path):
    rows = ("--rows", "base-federated,base-local,dirichlet-1-centralized")
    code, out, err = study(*SMALLEST, *rows, "--keep", "scores")
    assert code == 0, err
    folder = tmp_path / "runs/federated-quick"
    names = ("base-centralized", "base-federated", "base-local")
    runs = {name: RunFolder(folder / f"cells/{name}-seed0") for name in names}
    assert sorted(path.name for path in (folder / "cells").iterdir()) == [f"{name}-seed0" for name in names]
    rows_of = {row["kind"]: row for row in read_csv(folder / "table1.csv")}
    # 96 + 96 + 48 examples once; 9 clients of 32, 32 and 16, in batches of 8
    assert {row["examples"] for row in rows_of.values()} == {"240"}
    assert (rows_of["federated"]["steps"], rows_of["federated"]["steps_in_a_row"]) == ("30", "4")
    alone = last_evaluations(runs["base-local"])["sentiment"]["clients"]
    assert len(alone) == 3
    assert float(rows_of["local"]["sentiment_accuracy"]) == pytest.approx(sum(alone.values()) / 3)
    shared = last_evaluations(runs["base-federated"])["sentiment"]["metrics"]["accuracy"]
    gains = {row["client"]: row for row in read_csv(folder / "clients.csv") if row["task"] == "sentiment"}
    assert {client: float(row["points"]) for client, row in gains.items()} == {
        client: pytest.approx(100 * (shared - own)) for client, own in alone.items()
    }
    together = last_evaluations(runs["base-centralized"])["sentiment"]["metrics"]["accuracy"]
    dealt = [row for row in read_csv(folder / "table2.csv") if row["point"] == "Dirichlet 1"]
    assert [float(row["sentiment_accuracy"]) for row in dealt] == [pytest.approx(together)]
    body = (folder / "study.html").read_text()
    assert ElementTree.fromstring(body[body.index("<main") : body.index("</main>") + len("</main>")]).findall(".//svg")
    for name in ("modes-sentiment", "rounds-base-similarity", "gains-paraphrase"):
        assert ElementTree.parse(folder / f"figures/{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "93.09%" in (folder / "study.md").read_text()
    code, out, _ = study(*SMALLEST, *rows, "--keep", "scores")
    assert code == 0
    assert "3 of 3 cells were finished before" in out


def test_rates_are_chosen_in_a_study_of_their_own(study, tmp_path):
    code, _, err = study(*SMALLEST, "--choose", "1e-3,1e-2", "--rows", "*-centralized")
    assert code == 0, err
    rows = read_csv(tmp_path / "runs/federated-rates-quick/rates.csv")
    assert [row["learning_rate"] for row in rows] == ["0.001", "0.01"]
    best = max(rows, key=lambda row: float(row["mean"]))
    assert [row["is_best"] for row in rows] == ["best" if row is best else "" for row in rows]
    assert (
        f"--rate centralized={best['learning_rate']}" in (tmp_path / "runs/federated-rates-quick/study.md").read_text()
    )


@pytest.mark.slow
def test_a_users_own_config_is_compared_in_all_modes(study, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    code, _, err = study("--config", "own.yaml", "--rounds", "1", "--jobs", "1")
    assert code == 0, err
    folder = tmp_path / "runs/federated-own"
    rows = read_csv(folder / "table1.csv")
    assert [row["kind"] for row in rows] == list(MODES)
    assert all(row["sentiment_accuracy"] and "similarity_spearman" in row for row in rows)
    # Two clients have sentiment; the others' printed scores are of other tasks.
    assert {row["client"] for row in read_csv(folder / "clients.csv") if row["task"] == "sentiment"} == {"a", "b"}
    assert not (folder / "table7.csv").exists()
    assert "**One federated model has a mean score of" in (folder / "study.md").read_text()


@pytest.mark.slow
def test_the_quick_grid_has_every_row_within_three_minutes(study, tmp_path):
    started = time.monotonic()
    code, _, err = study("--quick")
    assert code == 0, err
    assert time.monotonic() - started < 180
    folder = tmp_path / "runs/federated-quick"
    for number, count in ((1, 5), (2, 20), (3, 15), (4, 10), (6, 18)):
        found = read_csv(folder / f"table{number}.csv")
        assert [bool(row["sentiment_accuracy"]) for row in found] == [True] * count
    assert len(read_csv(folder / "table5.csv")) == 26
    assert len(read_csv(folder / "table8.csv")) == 11
