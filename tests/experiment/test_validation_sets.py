"""A task with several validation sets: each is scored and reported, and the first alone counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedmtl import api
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import start_run
from fedmtl.runs.log import read_events, results_table
from fedmtl.tasks import load
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.sources import Table
from raw_events import raw_events

SMALL = ("defaults=plain", "model={server_model: random-1x32, pool: cls}",
         "training={num_rounds: 1, local_steps: 2, batch_size: 8}",
         "compute={workers: 0, device: cpu}")  # fmt: skip


def write(path: Path, count: int, first: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"premise {row}\thypothesis\t{(first + row) % 3}\n" for row in range(count))
    path.write_text(f"sentence1\tsentence2\tlabel\n{rows}")
    return str(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    for name, count in (("train", 24), ("dev_matched", 7), ("dev_mismatched", 10)):
        write(folder / "mnli" / f"{name}.tsv", count)
    return folder


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs")
    config = load_config(None, [*SMALL, "tasks={mnli: {}}", f"data.root={root}", f"output={output}"])
    return start_run(config, "mnli")


def test_both_sets_are_scored_in_every_round_and_the_first_counts(run):
    scored = {(event["round"], event["task"]): event for event in raw_events(run) if event["event"] == "evaluation"}
    assert list(scored) == [(0, "mnli"), (0, "mnli:mismatched"), (1, "mnli"), (1, "mnli:mismatched")]
    assert [event["examples"] for event in scored.values()] == [7, 10, 7, 10]
    ends = [event for event in raw_events(run) if event["event"] == "round"]
    assert [end["overall"] for end in ends] == [scored[number, "mnli"]["metrics"]["accuracy"] for number in (0, 1)]
    assert raw_events(run)[0]["tasks"]["mnli"]["further"] == ["mismatched"]


def test_results_csv_has_columns_of_both(run):
    with run.results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    scored = [event for event in raw_events(run) if event.get("task") == "mnli:mismatched"]
    assert [float(row["mnli:mismatched.accuracy"]) for row in rows] == [one["metrics"]["accuracy"] for one in scored]
    assert all(row["mnli.accuracy"] for row in rows)
    assert results_table(read_events(run)) == run.results.read_text()


def test_the_report_and_evaluate_have_both(run):
    page = run.report.read_text()
    # The table over the run, and that of the last evaluation.
    assert page.count(">mnli:mismatched<") >= 2
    again = api.Run.open(run.path).evaluate()
    last = {event["task"]: event for event in raw_events(run) if event["event"] == "evaluation"}
    assert {name: scores.metrics for name, scores in again.items()} == {
        name: event["metrics"] for name, event in last.items()
    }


def test_a_folder_without_the_second_set_has_one(root, tmp_path):
    write(tmp_path / "mnli" / "train.tsv", 12)
    (data,) = load_tasks(load_config(None, ["tasks={mnli: {}}", f"data.root={tmp_path}"])).values()
    assert data.further == {}


def test_the_hubs_second_split_is_read(monkeypatch):
    splits = []

    def read_hub(source, split, *, task, known):
        splits.append(split)
        columns = {"premise": ["a", "b", ""], "hypothesis": ["c", "d", "e"], "label": ["0", "1", "2"]}
        return Table(columns, split)

    monkeypatch.setattr(load, "read_hub", read_hub)
    (data,) = load_tasks(load_config(None, ["tasks={mnli: {}}"])).values()
    assert splits == ["train", "validation_matched", "validation_mismatched"]
    assert list(data.validation_sets()) == ["mnli", "mnli:mismatched"]
    # Of each split the row without a text is left out.
    assert (len(data.further["mismatched"]), data.origin) == (2, "hub nyu-mll/glue/mnli, 3 rows without text left out")


def files_of(folder: Path, **more: str) -> list[str]:
    files = {"train": write(folder / "a.tsv", 24), "validation": write(folder / "b.tsv", 6)}
    named = ", ".join(f"{name}: {write(folder / file, 30, first=1)}" for name, file in more.items())
    source = ", ".join(f"{key}: {path}" for key, path in files.items())
    task = "kind: classification, text: [sentence1, sentence2], label: label, val_samples: 20"
    return [*SMALL, f"tasks={{nli: {{{task}, source: {{{source}, more_validation: {{{named}}}}}}}}}"]


def test_a_task_of_ones_own_names_its_sets(tmp_path):
    (data,) = load_tasks(load_config(None, files_of(tmp_path, hard="hard.tsv", new="new.tsv"))).values()
    assert {name: len(examples) for name, examples in data.validation_sets().items()} == {
        "nli": 6, "nli:hard": 20, "nli:new": 20}  # fmt: skip


def test_where_clients_evaluate_a_named_set_is_refused_and_a_built_in_one_left_out(root, tmp_path):
    named = load_config(None, [*files_of(tmp_path, hard="hard.tsv"), "evaluation.where=clients"])
    with pytest.raises(ConfigError, match=r"tasks.nli.source.more_validation: is scored at a server"):
        prepare(named)
    built_in = [*SMALL, "tasks={mnli: {}}", f"data.root={root}", "evaluation.where=clients"]
    prepared = prepare(load_config(None, built_in))
    assert list(prepared.population.shared_validation) == ["mnli"]
    assert prepared.data["mnli"].origin.endswith("; mismatched is for a server to score")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{hub: a/b, more_validation: {x: y}}", "more_validation: found with a hub dataset; write"),
        ("{train: a.tsv, more_validation_splits: {x: y}}", "more_validation_splits: found without a hub dataset"),
        ("{hub: a/b, more_validation_splits: {x: test}}", "found test, and test splits are not for tuning"),
        ("{train: a.tsv, more_validation: {'x:y': z}}", "found the name 'x:y'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(source, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, [f"tasks={{sst2: {{source: {source}}}}}"])


def test_a_clients_files_have_one_validation_set():
    client = "{tasks: [sst2], source: {sst2: {train: a.tsv, more_validation: {x: y}}}}"
    with pytest.raises(ConfigError, match=r"clients.a.source.sst2: names further validation sets"):
        load_config(None, ["tasks={sst2: {}}", f"clients={{a: {client}}}"])
