"""What a run is compared with, and what it says of itself when it loses and when it does not."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

from fedmtl.config.file import load_config
from fedmtl.experiment.baselines import Sample, compare, draw_samples
from fedmtl.experiment.prepare import open_engine
from fedmtl.experiment.run import Interrupted, resume_run, start_run
from fedmtl.runs.events import BaselineEvent, EndEvent, RemarkEvent, WarningEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.verdicts import verdicts
from fedmtl.tasks.load import load_tasks

GOOD, BAD = ("lovely", "bright"), ("awful", "grey")
FILLER = ("the", "a", "this", "that", "film", "day", "food", "view")


def made_texts(count, seed):
    """Texts of three words, of which one gives the label away."""
    chosen = random.Random(seed)
    rows = []
    for number in range(count):
        label, words = (("good", GOOD), ("bad", BAD))[number % 2]
        filler = [chosen.choice(FILLER) for _ in range(2)]
        rows.append((" ".join([*filler, chosen.choice(words)]), label))
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    for name, count, seed in (("train", 80, 1), ("dev", 60, 2)):
        lines = ["text\tlabel", *("\t".join(row) for row in made_texts(count, seed))]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    pairs = [(f"{a} {number}", f"{b} {number}", f"{score}") for number in range(10) for a, b, score in
             (("red", "red", 5), ("red", "blue", 1), ("blue", "blue", 5), ("blue", "red", 1))]  # fmt: skip
    lines = ["a\tb\tscore", *("\t".join(pair) for pair in pairs)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return folder


def config_of(files, output, *overrides, **tasks):
    source = {"train": str(files / "train.tsv"), "validation": str(files / "dev.tsv")}
    mood = {"kind": "classification", "text": ["text"], "label": "label", "source": source}
    config = {
        "defaults": "plain",
        "model": {"server_model": "random-1x32", "pair": "dual", "pool": "mean", "max_length": 16},
        "tasks": {"mood": mood, **tasks},
        "training": {"num_rounds": 2, "batch_size": 8, "learning_rate": 1e-12},
        "data": {"cache": str(output / "tokens")},
        "compute": {"workers": 0, "device": "cpu"},
        "output": str(output),
    }
    return load_config(config, list(overrides))


@pytest.fixture(scope="module")
def loser(files, tmp_path_factory):
    """A run whose learning rate is next to nothing."""
    return start_run(config_of(files, tmp_path_factory.mktemp("lost")), "loser")


def scores(run):
    return {event.name: event for event in read_events(run) if isinstance(event, BaselineEvent)}


def test_a_run_is_compared_with_three_baselines(loser):
    pytest.importorskip("sklearn")
    found = scores(loser)
    assert list(found) == ["constant", "tfidf", "frozen"]
    # Sixty validation examples, half of them of either label; the word that gives it away is in the training texts.
    assert found["constant"].metrics["accuracy"] == 0.5
    assert found["tfidf"].metrics["accuracy"] == 1.0
    assert (found["tfidf"].train, found["tfidf"].available, found["tfidf"].examples) == (80, 80, 60)


def test_a_run_that_learns_nothing_says_that_it_lost_and_what_to_try(loser):
    (lost, *_) = verdicts(read_events(loser), "loser")
    assert lost.code == "baseline"
    assert lost.words.startswith("mood: accuracy 0.")
    assert "TF-IDF with a linear model (1.000)" in lost.words
    assert "it hardly learned: try a larger training.learning_rate" in lost.words
    page = loser.report.read_text()
    assert lost.words in page
    assert "What simpler models score" in page


def test_a_run_that_learns_says_how_far_ahead_it_is_and_nothing_else(files, tmp_path):
    learns = ("training.learning_rate=1e-2", "training.num_rounds=6", "model.encoder_dropout=0")
    run = start_run(config_of(files, tmp_path, *learns), "winner")
    only, few = verdicts(read_events(run), "winner")
    assert (only.code, few.code) == ("ahead", "exposed")
    assert "mood accuracy 1.000 is +0.000 to " in only.words


def test_a_comparison_changes_no_weight_and_a_resume_does_not_compute_it_again(files, tmp_path, loser):
    plain = start_run(config_of(files, tmp_path, "evaluation.baselines=none"), "plain")
    assert scores(plain) == {}
    hashes = [e.weights_sha256 for run in (plain, loser) for e in read_events(run) if isinstance(e, EndEvent)]
    assert hashes[0] == hashes[1]
    before = scores(loser)
    loser.report.unlink()
    resume_run(loser)
    assert scores(loser) == before
    assert len([e for e in read_events(loser) if isinstance(e, BaselineEvent)]) == len(before)


def test_as_many_labels_as_examples_are_no_warning_of_a_library(files, tmp_path, recwarn):
    pytest.importorskip("sklearn")
    rows = [f"text number {number}\tlabel-{number}" for number in range(40)]
    (tmp_path / "many.tsv").write_text("\n".join(["text\tlabel", *rows, ""]))
    many = {
        "kind": "classification",
        "text": ["text"],
        "label": "label",
        "source": {"train": str(tmp_path / "many.tsv"), "validation": str(tmp_path / "many.tsv")},
    }
    run = start_run(config_of(files, tmp_path, "training.num_rounds=1", many=many), "many")
    assert {event.task for event in read_events(run) if isinstance(event, BaselineEvent)} == {"mood", "many"}
    assert not [found for found in recwarn if "unique classes" in str(found.message)]


def test_without_scikit_learn_one_line_says_what_is_not_compared(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    run = start_run(config_of(files, tmp_path, "training.num_rounds=1"), "bare")
    assert list(scores(run)) == ["constant"]
    (said,) = [event.reason for event in read_events(run) if isinstance(event, RemarkEvent)]
    assert said.startswith("not compared with TF-IDF and the frozen encoder: scikit-learn is not installed; `pip")


def test_pairs_are_compared_by_what_they_share(files, tmp_path):
    pytest.importorskip("sklearn")
    source = {"train": str(files / "pairs.tsv"), "validation": str(files / "pairs.tsv")}
    alike = {"kind": "regression", "text": ["a", "b"], "label": "score", "score_range": [1, 5], "source": source}
    config = config_of(files, tmp_path, "evaluation.baselines=[tfidf, constant]", alike=alike)
    samples = {"alike": draw_samples(config, load_tasks(config))["alike"]}
    constant, words = compare(config, samples, "cpu", [])
    # The scores are 1 and 5, so their mean is off by 2; equal colours are shared words.
    assert constant.metrics["mse"] == pytest.approx(4.0)
    assert constant.metrics["pearson"] is None
    assert words.metrics["pearson"] > 0.95


def test_what_is_fitted_is_bounded(files, tmp_path):
    from fedmtl.experiment import baselines

    config = config_of(files, tmp_path)
    sample = draw_samples(config, load_tasks(config))["mood"]
    assert isinstance(sample, Sample)
    assert {sample.task.labels[label] for label in sample.train.labels[:10]} == {"good", "bad"}
    fewer = baselines._first(sample, 10, 5)
    assert (len(fewer.train), len(fewer.validation), fewer.available) == (10, 5, 80)


def test_clients_that_were_dealt_one_label_are_named_before_round_1(files, tmp_path):
    seen = []
    dealt = ("partition={kind: column, column: label}", "federation.clients_per_task=2", "training.num_rounds=0")
    start_run(config_of(files, tmp_path, *dealt, "evaluation.baselines=none"), "skewed", seen.append)
    said = [event.words for event in seen if isinstance(event, WarningEvent) and "one label" in event.words]
    assert said == ["mood: 2 of 2 clients (mood_client_1, ...) have examples of one label only"]


@pytest.mark.slow
def test_each_client_alone_and_each_task_by_itself_are_trained_on_request_and_once(files, tmp_path, monkeypatch):
    config = config_of(files, tmp_path, "evaluation.baselines=[alone, single]", "federation.clients_per_task=2")

    def interrupt(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return open_engine(*given)

    with monkeypatch.context() as patched:
        # The baseline's engine is the first that is opened.
        patched.setitem(start_run.__kwdefaults__, "make_engine", interrupt)
        with pytest.raises(Interrupted, match=r"a baseline was trained; go on with `fedmtl run --resume \S+/wanted`"):
            start_run(config, "wanted")
    run = RunFolder(tmp_path / "wanted")
    assert (run.path / "baselines" / "alone" / "config.yaml").exists()
    resume_run(run)
    found = scores(run)
    assert list(found) == ["alone", "single"]
    assert (run.path / "baselines" / "alone" / "events.jsonl").exists()
    # One task: federated by itself it is what the run is.
    last = [e for e in read_events(run) if e.kind == "evaluation"][-1]
    assert found["single"].metrics == last.metrics
    run.report.unlink()
    resume_run(run)
    assert len([e for e in read_events(run) if isinstance(e, BaselineEvent)]) == 2
