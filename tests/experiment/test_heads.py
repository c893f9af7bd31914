"""Runs whose heads have a hidden layer, or start with the head of the encoder's folder: from round 0 to what ships."""

from pathlib import Path

import pytest
import torch

from compress.listening import Listener
from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.prune import prune_run
from fedmtl.config.file import load_config
from fedmtl.experiment import run as running
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.model.saved import load_model
from fedmtl.predict.run import evaluate_validation, load_run
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import weights_sha256
from fedmtl.tasks.task import HiddenLayer
from model.tiny import write_classifier

HEADS = ("tasks.sentiment.head={hidden: 8}", "tasks.similarity.head={activation: tanh, dropout: 0.2}")
# One task whose folder has a head; of random values, so that a fresh one would answer otherwise.
PRETRAINED = (
    "tasks={sentiment: {train_samples: 40, val_samples: 24, head: pretrained}}",
    "model.pool=auto",
    "model.max_length=24",
)


def digest(run):
    return weights_sha256(load_model(run.model).weights)


def test_a_run_that_is_killed_goes_on_with_the_same_hidden_layers(make_config, run_once, monkeypatch, one_thread):
    whole = run_once(*HEADS)
    config = make_config(*HEADS)
    write, calls = running.append_results, []

    def dying(*given, **named):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the disk is full")
        return write(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(running, "append_results", dying)
        with pytest.raises(OSError, match="the disk is full"):
            start_run(config, "killed")
    resumed = resume_run(RunFolder(Path(config.output) / "killed"))
    assert digest(resumed) == digest(whole)
    weights = load_model(resumed.model).weights
    hidden = {key.name: (key.scope, tuple(value.shape)) for key, value in weights.items() if ".hidden." in key.name}
    # The pair is dual: 4 x 32 + 1 features in front of a layer as wide as the encoder.
    assert hidden == {
        "heads.sentiment.hidden.weight": ("task:sentiment", (8, 32)),
        "heads.sentiment.hidden.bias": ("task:sentiment", (8,)),
        "heads.similarity.hidden.weight": ("task:similarity", (32, 129)),
        "heads.similarity.hidden.bias": ("task:similarity", (32,)),
    }


def test_a_student_has_its_teachers_hidden_layers(run_once):
    teacher = run_once(*HEADS)
    settings = DistillSettings(student="1x64", epochs_intermediate=1, epochs_prediction=1)
    student = distill(teacher, load_config(teacher.config), settings, "student", Listener())
    saved = load_model(student.run.model)
    assert saved.tasks["sentiment"].head == HiddenLayer(8)
    # One that is as wide as its encoder is so in the student too.
    shapes = {key.name: tuple(value.shape) for key, value in saved.weights.items()}
    assert shapes["heads.similarity.hidden.weight"] == (64, 4 * 64 + 1)


@pytest.mark.parametrize("wanted", [Cut(amount=0.5), Cut(ffn=0.25)], ids=["weights", "neurons"])
def test_a_pruned_run_has_its_hidden_layers(run_once, wanted):
    run = run_once(*HEADS)
    pruned = start_run(prune_run(run, wanted, 1).config, "pruned")
    saved = load_model(pruned.model)
    assert saved.tasks == load_model(run.model).tasks
    zeros = {key.name: bool((value == 0).any()) for key, value in saved.weights.items() if key.name.endswith("weight")}
    assert zeros["heads.sentiment.hidden.weight"] is bool(wanted.amount)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    return folder, write_classifier("distilbert", folder)


def test_a_run_starts_with_the_head_of_the_folder_and_trains_it(make_config, classifier):
    folder, theirs = classifier
    overrides = (f"model.server_model={folder}", *PRETRAINED, "training.learning_rate=1e-12", "training.num_rounds=1")
    run = start_run(make_config(*overrides), "pretrained")
    weights = {key.name: value for key, value in load_model(run.model).weights.items()}
    for ours, layer in (("hidden.", theirs.pre_classifier), ("", theirs.classifier)):
        torch.testing.assert_close(weights[f"heads.sentiment.{ours}weight"], layer.weight, rtol=0, atol=1e-9)
        torch.testing.assert_close(weights[f"heads.sentiment.{ours}bias"], layer.bias, rtol=0, atol=1e-9)
    assert evaluate_validation(load_run(run)).keys() == {"sentiment"}


def test_a_pruned_run_takes_the_head_of_the_run_and_not_of_the_folder(make_config, classifier):
    folder, _ = classifier
    run = start_run(make_config(f"model.server_model={folder}", *PRETRAINED, "training.num_rounds=1"), "first")
    config = prune_run(run, Cut(amount=0.5), 1).config
    assert config.tasks["sentiment"].head.model_dump() == {"hidden": None, "activation": "relu", "dropout": 0.2}
    saved = load_model(start_run(config, "second").model)
    assert saved.tasks["sentiment"].head_start == "fresh"
