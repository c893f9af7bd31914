"""Runs with tasks that tag words: what is bit-identical, scored and refused."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmtl.cli.app import app
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import DataEvent, EvaluationEvent, RoundEvent, StartEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from outcomes import digest, scores

BASE = (
    "defaults=plain",
    "model.server_model=random-1x32",
    "tasks.roles={train_samples: 60, val_samples: 30}",
    "tasks.settings={train_samples: 50, val_samples: 20}",
    "federation.clients_per_task=2",
    "training.num_rounds=2",
    "training.batch_size=8",
    "training.learning_rate=3e-3",
    "compute.workers=0",
    "compute.device=cpu",
)
MIXED = ("tasks.sentiment={train_samples: 40, val_samples: 20}",)


@pytest.fixture
def run(tmp_path):
    def made(name, *overrides):
        return start_run(load_config(None, [*BASE, f"output={tmp_path}", *overrides]), name)

    return made


@pytest.mark.slow
def test_workers_give_the_same_bits(run):
    alone = run("alone", *MIXED)
    others = run("others", *MIXED, "compute.workers=2")
    assert digest(alone) == digest(others)
    assert scores(alone) == scores(others)


def test_a_run_that_was_killed_goes_on_to_the_same_bits(run, tmp_path):
    whole = run("whole", *MIXED)

    def interrupt(event):
        if isinstance(event, RoundEvent) and event.round == 1:
            raise MemoryError("killed")

    with pytest.raises(MemoryError):
        start_run(load_config(None, [*BASE, *MIXED, f"output={tmp_path}"]), "killed", interrupt)
    resumed = resume_run(RunFolder(tmp_path / "killed"))
    assert digest(resumed) == digest(whole)
    assert scores(resumed) == scores(whole)


def test_scores_are_in_the_tables(run):
    folder = run("one")
    start, data = first_of(read_events(folder), StartEvent), first_of(read_events(folder), DataEvent)
    assert start.tasks["roles"].metrics == ["f1", "macro_f1", "strict_f1", "precision", "recall"]
    assert start.tasks["roles"].pool == "words"
    # Spans of each type in the training texts: one doer and one receiver in each.
    assert data.labels == {"doer": 60, "receiver": 60}
    rows = list(csv.DictReader(folder.results.read_text().splitlines()))
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert rows[-1]["roles.f1"]
    last = [event for event in events_of(read_events(folder), EvaluationEvent) if event.task == "roles"][-1]
    assert last.by_label["doer"]["true"] == last.by_label["receiver"]["true"] == 30
    page = folder.report.read_text()
    assert "roles: confusion matrix" in page
    assert all(words in page for words in ("doer", "receiver", "no span", "other words"))
    assert [sum(row) for row in last.confusion[:2]] == [30, 30]


def test_scores_at_clients_are_sums_of_theirs(run):
    at_clients = run("clients", "evaluation.where=clients")
    at_server = run("server")
    assert digest(at_clients) == digest(at_server)
    for key, found in scores(at_clients).items():
        # Two clients are scored on the server's examples each, so that their sums are twice the server's.
        expected = scores(at_server)[key]
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6)
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.smart={weight: 1}",),
        ("training.gradients=pcgrad", "training.task_schedule=joint", "mode=centralized"),
        ("model.lora={rank: 2}",),
        ("model.adapters={kind: pals, size: 8, heads: 2}",),
        ("mode=centralized", "training.task_schedule=round_robin"),
        ("partition.kind=dirichlet",),
        ("tasks.roles.head={hidden: 16}", "training.loss_weighting=uncertainty"),
        ("federation.server_optimizer.kind=fedavgm", "sharing.adaptive={}"),
        ("training.pruning={amount: 0.3, rounds: 1}",),
        ("federation.vocabulary_slices=true", "wire.up=int8"),
        ("compute.stack=4",),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
def test_it_goes_together_with(run, overrides):
    folder = run("with", *MIXED, "training.num_rounds=1", *overrides)
    found = scores(folder)[1, "roles"]
    assert found["loss"] < scores(folder)[0, "roles"]["loss"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("training.logit_adjustment=1",), "training.logit_adjustment: the outputs of roles cannot be adjusted"),
        (
            ("privacy.example={noise_multiplier: 1, delta: 1e-5, max_grad_norm: 1}",),
            "tasks.roles.kind: found with privacy.example",
        ),
        (
            ("privacy.secure_aggregation={}", "evaluation.where=clients", "federation.clients_per_task=3"),
            "tasks.roles.kind: found tagging, whose scores cannot be added up under masks",
        ),
        (("tasks.roles.class_weights=balanced",), "tasks.roles.class_weights: found on a tagging"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(run, overrides, words):
    with pytest.raises(ConfigError, match=words):
        run("refused", *overrides)


def test_files_with_spans_are_read_trained_on_and_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    for name in ("Ada", "Grace Hopper", "Alan"):
        for place in ("London", "New York"):
            start = len(f"{name} lives in ")
            spans = [[0, len(name), "PER"], [start, start + len(place), "LOC"]]
            lines.append({"text": f"{name} lives in {place}.", "label": spans})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "dev.conll").write_text("Ada\tI-PER\nsang\tO\n\nin\tO\nYork\tI-LOC\n")
    config = {"names": {"kind": "tagging", "source": {"train": "train.jsonl", "validation": "dev.conll"}}}
    (tmp_path / "run.yaml").write_text(json.dumps({"tasks": config}))
    overrides = [word for pair in BASE[:2] for word in ("--set", pair)]
    more = ["--set", "training={num_rounds: 1, local_epochs: 40, learning_rate: 1e-2}", "--set", "compute.workers=0"]
    call = CliRunner().invoke
    result = call(
        app, ["run", "run.yaml", "--name", "one", *overrides, *more, "--set", "federation.clients_per_task=1"]
    )
    assert result.exit_code == 0, result.output
    assert call(app, ["check", "run.yaml"]).exit_code == 0
    answered = json.loads(call(app, ["predict", "one", "--json", "Ada lives in London."]).output)
    entities = answered["predictions"][0]["entities"]
    assert {(each["text"], each["label"]) for each in entities} == {("Ada", "PER"), ("London", "LOC")}
    assert all((each["start"], each["end"]) in ((0, 3), (13, 19)) for each in entities)
    result = call(app, ["evaluate", "one", "--task", "names", "--file", "dev.conll", "--out", "answers.jsonl"])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    # Tags beside tags, and the spans with their probabilities.
    assert records[0]["label"] == records[0]["answer"] == "B-PER O"
    assert [span[:3] for span in json.loads(records[0]["probabilities"])] == [[0, 3, "PER"]]
    result = call(app, ["evaluate", "one", "--task", "names", "--file", "dev.conll", "--out", "answers.csv"])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(Path("answers.csv").read_text().splitlines()))
    assert [row["answer"] for row in rows] == [record["answer"] for record in records]
    # Words stay those of the file; the answers are files that this very task reads.
    Path("words.conll").write_text("# a comment\nAda\nlives\nin\nU.S.\n\n#1\n")
    for out in ("tags.conll", "spans.jsonl"):
        result = call(app, ["predict", "one", "--file", "words.conll", "--with-text", "--out", out])
        assert result.exit_code == 0, result.output
    words = [line.partition("\t")[0] for line in Path("tags.conll").read_text().splitlines()]
    assert words == ["Ada", "lives", "in", "U.S.", "", "#1", ""]
    spans = [json.loads(line) for line in Path("spans.jsonl").read_text().splitlines()]
    assert (spans[0]["line"], spans[0]["text"]) == (2, "Ada lives in U.S.")
    assert spans[0]["names"][0] == [0, 3, "PER"]
    Path("more.jsonl").write_text("".join(json.dumps({"text": s["text"], "label": s["names"]}) + "\n" for s in spans))
    for name in ("tags.conll", "more.jsonl"):
        result = call(app, ["evaluate", "one", "--task", "names", "--file", name, "--json"])
        assert result.exit_code == 0, result.output


def test_a_student_learns_soft_tags(run, tmp_path):
    teacher = run("teacher", "tasks.sentiment={train_samples: 40, val_samples: 20}")
    given = f"training.distillation={{teacher: {teacher.path}, weight: 1}}"
    taught = run("taught", *MIXED, "training.num_rounds=1", "model.server_model=random-1x16", given)
    assert scores(taught)[1, "roles"]["loss"] < scores(taught)[0, "roles"]["loss"]


def test_answers_and_scores_of_a_finished_run(run):
    from fedmtl.predict.run import evaluate_validation, load_run, predict_texts

    folder = run("one", *MIXED)
    loaded = load_run(folder)
    last = scores(folder)[2, "roles"]
    assert evaluate_validation(loaded, "roles")["roles"].metrics == {
        name: value for name, value in last.items() if name != "loss"
    }
    rows = predict_texts(loaded, [("the cook helped the pilot",), ("so",)], ["roles", "settings", "sentiment"])
    assert [[answer.task for answer in row] for row in rows] == [["roles", "settings", "sentiment"]] * 2


def test_what_a_kind_fits_on_validation_is_saved_with_the_model(run, monkeypatch):
    from dataclasses import replace

    from fedmtl.predict.run import load_run
    from fedmtl.tasks.kinds.tagging import Tagging

    def fitted(self, task, outputs, labels):
        # As many rows of outputs as words, of the texts of validation.
        assert outputs.lengths().tolist() == labels.lengths().tolist()
        return replace(task, fitted=(float(len(labels)), 0.5))

    monkeypatch.setattr(Tagging, "fitted", fitted)
    folder = run("one", "training.num_rounds=1")
    assert {name: task.fitted for name, task in load_run(folder).saved.tasks.items()} == {
        "roles": (30.0, 0.5),
        "settings": (20.0, 0.5),
    }
