"""The server teaches what it averaged, on texts without labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.messages import State
from fedmtl.methods.distillation import ServerDistillation
from fedmtl.runs.event_lines import to_json
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.tasks.load import load_tasks
from raw_events import raw_events
from small_config import SMALL

TASKS = ("sentiment", "paraphrase", "similarity")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("teacher")
    # Heads that are trained hard, so that there is something to learn.
    hard = ("training.head_rate=100", "seed=5")
    return start_run(load_config(None, [*SMALL, *hard, f"output={folder}"]), "teacher")


@pytest.fixture
def texts(make_config, tmp_path) -> list[str]:
    """The texts of the training examples: single ones by line, pairs in a table of two columns."""
    data = load_tasks(make_config())
    (tmp_path / "single.txt").write_text("\n".join(data["sentiment"].train.texts[0]))
    rows = ["first\tsecond", *("\t".join(row) for row in zip(*data["paraphrase"].train.texts, strict=True))]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    return [str(tmp_path / "single.txt"), str(tmp_path / "pairs.tsv")]


def taught(teacher: RunFolder, texts: list[str], *keys: str, steps: int = 6) -> str:
    told = [f"teacher: {teacher.path}", "where: server", f"texts: [{', '.join(texts)}]", f"steps: {steps}", *keys]
    return f"training.distillation={{{', '.join(told)}}}"


def distilling(config) -> ServerDistillation:
    """The method that the config's server has."""
    [method] = [method for method in prepare(config).server.methods if method.name == "distillation"]
    return method


def refined(config, state: State) -> State:
    return distilling(config).after_aggregation(state, state).state


def test_the_taught_model_is_nearer_to_its_teacher_and_nothing_else_changed(teacher, texts, make_config):
    config = make_config(taught(teacher, texts, steps=45), "model.encoder_dropout=0", "model.head_dropout=0")
    method = distilling(config)
    states, losses = [replace(prepare(config).state, round=1)], []
    for _ in range(3):
        step = method.after_aggregation(states[-1], states[-1])
        states.append(step.state)
        [event] = map(to_json, step.events)
        losses.append(event["losses"])
        assert (event["event"], event["round"], event["steps"]) == ("distillation", 1, 45)
    for task in TASKS:
        assert losses[2][task] < 0.8 * losses[0][task]
    assert {key: value.shape for key, value in states[3].weights.items()} == {
        key: value.shape for key, value in states[0].weights.items()
    }
    assert (states[3].round, states[3].progress, states[3].plan) == (1, {}, states[0].plan)
    again = refined(config, states[0])
    assert all((again.weights[key] == value).all() for key, value in states[1].weights.items())
    other = refined(make_config(taught(teacher, texts, steps=45), "seed=9"), states[0])
    assert any((other.weights[key] != value).any() for key, value in states[1].weights.items())


def test_a_task_that_was_stopped_is_not_taught_any_more(teacher, texts, make_config):
    early = ("tasks.sentiment.patience=1", "training.num_rounds=6")
    events = raw_events(start_run(make_config(taught(teacher, texts, "tasks: [sentiment]"), *early), "stopped"))
    [stopped] = [event["round"] for event in events if event["event"] == "early_stop" and event["task"] == "sentiment"]
    lessons = {event["round"]: event["losses"] for event in events if event["event"] == "distillation"}
    assert stopped < 6
    assert all(bool(losses) == (number <= stopped) for number, losses in lessons.items())


def test_a_round_ends_with_the_taught_weights_and_a_resume_gives_them_again(teacher, texts, make_config):
    config = make_config(taught(teacher, texts, "tasks: [sentiment, paraphrase]"), "checkpoint.every=1")
    whole = start_run(config, "whole", profile=True)
    events = raw_events(whole)
    lessons = [event for event in events if event["event"] == "distillation"]
    assert [(event["round"], event["steps"], set(event["losses"])) for event in lessons] == [
        (1, 6, {"sentiment", "paraphrase"}),
        (2, 6, {"sentiment", "paraphrase"}),
    ]
    assert all(event["seconds"] > 0 for event in lessons)
    assert all(event["server"]["teaching"] > 0 for event in events if event["event"] == "profile" and event["round"])
    assert "distilled the model from a teacher: 12 steps" in whole.report.read_text()
    for path in whole.checkpoints.glob("round-0002*"):
        path.unlink()
    before = summarize(read_events(whole), "whole").weights_sha256
    assert load_checkpoint(whole.checkpoints).round == 1
    assert summarize(read_events(resume_run(whole)), "whole").weights_sha256 == before


def test_texts_that_do_not_fit_and_values_at_clients_are_refused(teacher, texts, make_config):
    with pytest.raises(ConfigError, match=r"training.distillation.texts: no file has pairs of texts for paraphrase"):
        prepare(make_config(taught(teacher, texts[:1])))
    with pytest.raises(ConfigError, match=r"training.distillation.where: found server, but the sharing plan keeps"):
        prepare(make_config(taught(teacher, texts), 'sharing.rules=[{"heads.*": client}, {"*": all}]'))


def test_labels_are_not_read(teacher, texts, make_config, tmp_path):
    # A column of labels beside the task's own columns changes nothing.
    rows = Path(texts[1]).read_text().splitlines()
    first, second = prepare(make_config()).tasks["paraphrase"].text
    named = [f"{first}\t{second}\tlabel", *(f"{row}\tnonsense" for row in rows[1:])]
    (tmp_path / "labelled.tsv").write_text("\n".join(named))
    config = make_config(taught(teacher, [str(tmp_path / "labelled.tsv")], "tasks: [paraphrase]"))
    shard = distilling(config)._shards["paraphrase"]
    assert len(shard) == 40
    assert not np.any(shard.labels)
