"""A finished run as teacher: what it answers, who may learn from it, and what a run with one comes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment import run as driver
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.methods.distillation import open_teacher
from fedmtl.predict.run import load_run, predict_texts
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.tasks.load import load_tasks
from raw_events import raw_events
from small_config import SMALL

CPU = "cpu"
# Another encoder, another length and pairs in one pass: only texts and labels are in common.
OTHER = ("model.server_model=random-1x64", "model.pair=cross", "model.max_length=40", "training.num_rounds=1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("teacher")
    return start_run(load_config(None, [*SMALL, *OTHER, f"output={folder}"]), "teacher")


def digest(run: RunFolder) -> str | None:
    return summarize(read_events(run), run.name).weights_sha256


def taught(teacher: RunFolder, *keys: str) -> str:
    return f"training.distillation={{{', '.join([f'teacher: {teacher.path}', *keys])}}}"


def test_its_outputs_are_its_own_for_every_example_and_are_computed_once(teacher, make_config, tmp_path):
    config = make_config(taught(teacher), f"data.cache={tmp_path / 'cache'}")
    data = load_tasks(config)
    seen: list[str] = []
    loaded = load_run(teacher)
    for _ in range(2):
        opened = open_teacher(
            config, "clients", {name: part.task for name, part in data.items()}, CPU, lambda e: seen.append(e.task)
        )
        for name, part in data.items():
            outputs = np.load(opened.outputs(part.task, part.train.texts))
            answers = predict_texts(loaded, list(zip(*part.train.texts, strict=True)), [name])
            if part.task.kind == "regression":
                low, high = part.task.score_range
                expected = [[(answer.score - low) / (high - low)] for (answer,) in answers]
                np.testing.assert_allclose(outputs, expected, atol=1e-5)
            else:
                shares = torch.softmax(torch.from_numpy(outputs), -1)
                np.testing.assert_allclose(shares, [list(a.probabilities.values()) for (a,) in answers], atol=1e-5)
    assert seen == list(data)


def test_clients_get_the_outputs_of_their_own_examples(teacher, make_config):
    prepared = prepare(make_config(taught(teacher, "tasks: [sentiment]")))
    shard = prepared.population.train["sentiment_client_2"]["sentiment"]
    whole = np.load(shard.teacher)
    assert len(whole) == 40
    assert np.array_equal(shard.teacher_outputs(shard.indices[:3]), whole[shard.indices[:3]])
    assert prepared.population.train["similarity_client_1"]["similarity"].teacher is None
    assert all(part.teacher is None for part in prepared.population.shared_validation.values())
    told = prepared.server.settings.methods["distillation"]
    assert told == {"weight": 0.5, "temperature": 2.0, "tasks": ["sentiment"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": ("positive", "negative")}, "sentiment has the labels"),
        ({"kind": "regression"}, "sentiment has the kind classification in .* and regression here"),
        ({"text": ("a", "b")}, "sentiment has the number of texts 1 in .* and 2 here"),
        ({"name": "mood"}, "has no task mood, it has sentiment, paraphrase, similarity; name those it teaches"),
    ],
)
def test_a_teacher_of_something_else_is_refused(teacher, make_config, changes, words):
    config = make_config(taught(teacher))
    task = replace(prepare(make_config()).tasks["sentiment"], **changes)
    with pytest.raises(ConfigError, match=f"training.distillation.teacher: .*{words}") as raised:
        open_teacher(config, "clients", {task.name: task}, CPU)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model_and_a_model_without_its_values_are_refused(teacher, make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"teacher: .* holds no finished model on this machine"):
        prepare(make_config(f"training.distillation={{teacher: {tmp_path}}}"))
    kept = start_run(make_config('sharing.rules=[{"heads.*": client}, {"*": all}]', "training.num_rounds=0"), "kept")
    with pytest.raises(ConfigError, match=r"heads\.\w+\.weight` stayed at the clients"):
        prepare(make_config(taught(kept)))


def test_the_model_folder_itself_is_a_teacher_too(teacher, make_config):
    prepared = prepare(make_config(f"training.distillation={{teacher: {teacher.model}}}"))
    assert set(prepared.server.settings.methods["distillation"]["tasks"]) == set(prepared.tasks)


def test_students_come_nearer_to_their_teacher(teacher, make_config):
    # Weight 1: labels count nothing, so the distance to the teacher is all that training lowers.
    config = make_config(taught(teacher, "weight: 1.0"), "training.num_rounds=4", "model.head_dropout=0")
    rounds = [event for event in raw_events(start_run(config, "student")) if event["event"] == "round"]
    for task in ("sentiment", "paraphrase", "similarity"):
        assert rounds[4]["losses"][task] < rounds[1]["losses"][task]


# SMART, its average of weights, and a teacher at once.


def everything(teacher: RunFolder) -> list[str]:
    smart = "training.smart={weight: 1.0, bregman: 0.5, momentum: 0.9}"
    return [taught(teacher), smart, "training.num_rounds=3", "training.keep_optimizer=true"]


@pytest.mark.slow
def test_any_number_of_workers_and_a_resume_give_the_same_weights(teacher, make_config, monkeypatch):
    # One with two workers; one in this process that loses its second round after training and goes on.
    overrides = everything(teacher)
    whole = start_run(make_config(*overrides, "compute.workers=2"), "whole")
    killed = interrupted(make_config(*overrides), monkeypatch)
    assert digest(resume_run(killed)) == digest(whole)


def interrupted(config, monkeypatch) -> RunFolder:
    """A run that dies while it records its third turn, which is round 2."""

    class Killed(BaseException):
        pass

    record, turns = driver._record, []

    def dying(turn, *rest):
        turns.append(turn)
        if len(turns) == 3:
            raise Killed
        record(turn, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_record", dying)
        with pytest.raises(Killed):
            start_run(config, "killed")
    run = RunFolder(Path(config.output) / "killed")
    assert load_checkpoint(run.checkpoints).round == 1
    return run
