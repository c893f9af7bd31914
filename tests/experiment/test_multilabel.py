"""Runs with a task of several labels a text: what is bit-identical, scored, fitted, answered and refused."""

import csv
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmtl.cli.app import app
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.predict.run import evaluate_validation, load_run, predict_texts
from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import DataEvent, EvaluationEvent, RoundEvent, StartEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from outcomes import digest, scores

WORDS = {"anger": "furious", "fear": "afraid", "joy": "delighted"}
BASE = (
    "defaults=plain",
    "model.server_model=random-1x32",
    "federation.clients_per_task=2",
    "training.num_rounds=2",
    "training.batch_size=8",
    "training.learning_rate=3e-3",
    "compute.workers=0",
    "compute.device=cpu",
)
MIXED = ("tasks.sentiment={train_samples: 40, val_samples: 20}",)


def write_moods(folder, name, count, seed):
    """Texts of which each mood's word says that they have it; some have none."""
    chance = random.Random(seed)
    lines = []
    for _ in range(count):
        moods = [mood for mood in WORDS if chance.random() < 0.4]
        words = [WORDS[mood] for mood in moods] + chance.choices(("the", "cook", "was", "here", "today"), k=4)
        chance.shuffle(words)
        lines.append(json.dumps({"text": " ".join(words), "labels": moods}) + "\n")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def files(tmp_path):
    return [write_moods(tmp_path, "train", 60, 1), write_moods(tmp_path, "dev", 30, 2)]


@pytest.fixture
def settings(tmp_path, files):
    train, dev = files
    source = f"{{train: {train}, validation: {dev}}}"
    return [*BASE, f"tasks.moods={{kind: multilabel, source: {source}}}", f"output={tmp_path}"]


@pytest.fixture
def run(settings):
    def made(name, *overrides):
        return start_run(load_config(None, [*settings, *overrides]), name)

    return made


@pytest.mark.slow  # Starts two workers, which import torch.
def test_workers_give_the_same_bits(run):
    alone = run("alone", *MIXED)
    others = run("others", *MIXED, "compute.workers=2")
    assert digest(alone) == digest(others)
    assert scores(alone) == scores(others)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bits(run, settings, tmp_path):
    whole = run("whole", *MIXED)

    def interrupt(event):
        if isinstance(event, RoundEvent) and event.round == 1:
            raise MemoryError("killed")

    with pytest.raises(MemoryError):
        start_run(load_config(None, [*settings, *MIXED]), "killed", interrupt)
    resumed = resume_run(RunFolder(tmp_path / "killed"))
    assert digest(resumed) == digest(whole)
    assert scores(resumed) == scores(whole)


def test_scores_and_counts_are_in_the_tables(run, files):
    folder = run("one")
    start, data = first_of(read_events(folder), StartEvent), first_of(read_events(folder), DataEvent)
    assert start.tasks["moods"].metrics == ["f1", "macro_f1", "subset_accuracy", "precision", "recall"]
    true = {split: [json.loads(line)["labels"] for line in path.read_text().splitlines()]
            for split, path in zip(("train", "dev"), files, strict=True)}  # fmt: skip
    counts = {split: {mood: sum(mood in row for row in found) for mood in WORDS} for split, found in true.items()}
    assert data.labels == counts["train"]
    rows = list(csv.DictReader(folder.results.read_text().splitlines()))
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert rows[-1]["moods.macro_f1"]
    last = list(events_of(read_events(folder), EvaluationEvent))[-1]
    assert {mood: row["true"] for mood, row in last.by_label.items()} == counts["dev"]
    # While it trains the threshold is a fixed one.
    assert {row["threshold"] for row in last.by_label.values()} == {0.3}
    page = folder.report.read_text()
    assert all(mood in page for mood in WORDS)
    # The curve of all labels together has the score of the table at the threshold of the table.
    assert "moods: F1 by threshold" in page
    assert last.curves.together["f1"][last.curves.thresholds.index(0.3)] == last.metrics["f1"]


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
        ("partition={kind: dirichlet, alpha: 5}",),
        ("tasks.moods.head={hidden: 16}", "training.loss_weighting=uncertainty"),
        ("federation.server_optimizer.kind=fedavgm", "sharing.adaptive={}"),
        ("training.pruning={amount: 0.3, rounds: 1}",),
        ("federation.vocabulary_slices=true", "wire.up=int8"),
        ("privacy.secure_aggregation={}", "federation.clients_per_task=3", "evaluation.where=clients"),
        ("privacy.example={noise_multiplier: 0.05}",),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
def test_it_goes_together_with(run, overrides):
    # A task beside it has more clients than it has sums of its own.
    mixed = () if "secure" in overrides[0] else MIXED
    more = ("training.num_rounds=1", "training.local_epochs=4", "training.head_rate=5")
    folder = run("with", *mixed, *more, *overrides)
    found = scores(folder)
    assert found[1, "moods"]["loss"] < found[0, "moods"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        # Clients of other kinds train at once, those of this one by one.
        ("compute.stack=4",),
        ("mode=federated_single_task",),
        ("mode=local",),
        ("sharing.rules=[{heads.*: client}, {'*': all}]",),
        ("federation.aggregation=multi_krum", "federation.clients_per_task=4"),
        ("privacy.client={noise_multiplier: 0.001, delta: 1e-5, max_norm: 10}", "federation.average=uniform"),
        ("federation.task_weighting.kind=progress", "training.proximal=0.001"),
        ("mode=centralized", "training.task_schedule=annealed", "training.schedule=cosine"),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
def test_it_goes_together_with_what_takes_longer_to_learn(run, overrides):
    folder = run("with", *MIXED, "training.local_epochs=15", "training.learning_rate=1e-2", *overrides)
    found = scores(folder)
    assert found[2, "moods"]["loss"] < found[0, "moods"]["loss"]


@pytest.mark.slow
def test_commands_compare_distil_prune_and_quantize_it(run, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    more = ("training.num_rounds=1", "training.local_epochs=20", "training.learning_rate=1e-2")
    found = [run("one", *more).path, run("two", *more, "mode=federated_single_task").path]
    for words in (
        ["compare", *map(str, found)],
        ["distill", str(found[0]), "--student", "1x16", "--name", "student"],
        ["prune", str(found[0]), "--amount", "0.2"],
        ["prune", str(found[0]), "--ffn", "0.5"],
        ["export", str(found[0]), "--to", "onnx"],
        ["quantize", str(found[0])],
        ["report", str(found[0])],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{words}: {result.output}"
        if words[0] == "compare":
            assert "moods macro_f1" in result.output


def test_scores_under_masks_are_those_of_the_sums(run):
    three = ("training.num_rounds=1", "federation.clients_per_task=3", "evaluation.where=clients")
    masked, plain = run("masked", *three, "privacy.secure_aggregation={}"), run("plain", *three)
    for name, value in scores(plain)[0, "moods"].items():
        assert scores(masked)[0, "moods"][name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("training.logit_adjustment=1",), "training.logit_adjustment: the outputs of moods cannot be adjusted"),
        (("tasks.moods.class_weights=balanced",), "tasks.moods.class_weights: found on a multilabel"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(run, overrides, words):
    with pytest.raises(ConfigError, match=words):
        run("refused", *overrides)


def test_a_student_learns_soft_labels(run):
    teacher = run("teacher")
    given = f"training.distillation={{teacher: {teacher.path}, weight: 1}}"
    student = run("student", "training.num_rounds=1", "model.server_model=random-1x16", given)
    assert scores(student)[1, "moods"]["loss"] < scores(student)[0, "moods"]["loss"]


def test_thresholds_are_fitted_when_the_model_is_finished_and_saved_with_it(run):
    folder = run("one", "training.local_epochs=20", "training.learning_rate=1e-2", "federation.clients_per_task=1")
    loaded = load_run(folder)
    fitted = loaded.saved.tasks["moods"].fitted
    assert len(fitted) == len(WORDS)
    assert all(0 < threshold < 1 for threshold in fitted)
    # A run is scored at the fixed threshold, its model at those that were fitted: no worse on what they were fitted to.
    found = evaluate_validation(loaded, "moods")["moods"].metrics
    assert found["f1"] >= scores(folder)[2, "moods"]["f1"]
    ((answer,),) = predict_texts(loaded, [("the cook was furious today and afraid",)], ["moods"])
    chosen = {mood for mood, limit in zip(sorted(WORDS), fitted, strict=True) if answer.probabilities[mood] > limit}
    assert set(answer.answer.labels) == chosen
    # A third label may be chosen too where the last digits of a run differ, as they do without the compiled kernels.
    assert chosen >= {"anger", "fear"}


def test_what_is_scored_at_clients_has_the_fixed_threshold(tmp_path):
    """No example is at the server: there is nothing to fit thresholds to."""
    sources = {f"site{n}": {"tasks": ["moods"], "source": {"moods": f"{write_moods(tmp_path, f'at{n}', 30, n)}"}}
               for n in range(2)}  # fmt: skip
    config = [*BASE, "tasks.moods={kind: multilabel}", f"clients={json.dumps(sources)}", f"output={tmp_path}"]
    config = [key for key in config if not key.startswith("federation.clients_per_task")]
    folder = start_run(load_config(None, [*config, "evaluation.where=clients", "training.num_rounds=1"]), "sites")
    tasks = load_run(folder).saved.tasks
    assert tasks["moods"].labels == ("anger", "fear", "joy")


def renamed(name, **columns):
    """A file of JSON lines with other names of its columns."""
    lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
    lines = [{columns.get(key, key): value for key, value in line.items()} for line in lines]
    Path(f"renamed-{name}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"renamed-{name}"


def test_files_are_checked_trained_on_and_answered(tmp_path, files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"moods": {"kind": "multilabel", "source": {"train": "train.jsonl", "validation": "dev.jsonl"}}}
    (tmp_path / "run.yaml").write_text(json.dumps({"tasks": config}))
    overrides = [word for pair in BASE[:2] for word in ("--set", pair)]
    training = "training={num_rounds: 2, local_epochs: 20, learning_rate: 1e-2}"
    call = CliRunner().invoke
    overrides += ["--set", training, "--set", "compute.workers=0", "--set", "federation.clients_per_task=1"]
    result = call(app, ["run", "run.yaml", "--name", "one", *overrides])
    assert result.exit_code == 0, result.output
    checked = call(app, ["check", "run.yaml", "--json"])
    assert checked.exit_code == 0, checked.output
    text = "the cook was furious and afraid"
    answered = json.loads(call(app, ["predict", "one", "--json", text]).output)["predictions"][0]
    assert set(answered["labels"]) == {"anger", "fear"}
    assert set(answered["probabilities"]) == set(WORDS)
    shown = call(app, ["predict", "one", text]).output
    assert "anger (" in shown
    assert "fear (" in shown
    Path("texts.txt").write_text(f"{text}\nthe cook was here\n")
    for out in ("answers.csv", "answers.jsonl"):
        result = call(app, ["predict", "one", "--file", "texts.txt", "--out", out])
        assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(Path("answers.csv").read_text().splitlines()))
    assert set(json.loads(rows[0]["moods"])) == {"anger", "fear"}
    lines = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [json.loads(row["moods"]) for row in rows] == [line["moods"] for line in lines]
    result = call(app, ["evaluate", "one", "--task", "moods", "--file", "dev.jsonl", "--out", "scored.csv"])
    assert result.exit_code == 0, result.output
    records = list(csv.DictReader(Path("scored.csv").read_text().splitlines()))
    assert len(records) == 30
    first = json.loads(Path("dev.jsonl").read_text().splitlines()[0])
    assert json.loads(records[0]["label"]) == first["labels"]
    shares = json.loads(records[0]["probabilities"])
    assert json.loads(records[0]["answer"]) == sorted(json.loads(records[0]["answer"]), key=lambda mood: -shares[mood])
    # Answers are labels for others to train on, in either form.
    result = call(app, ["predict", "one", "--file", "texts.txt", "--with-text", "--out", "more.jsonl"])
    result = call(app, ["evaluate", "one", "--task", "moods", "--file", renamed("more.jsonl", moods="labels")])
    assert result.exit_code == 0, result.output
