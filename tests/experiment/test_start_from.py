"""A run that starts with a finished one's model."""

from __future__ import annotations

import json

import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.model.saved import load_model
from fedmtl.sharing.plan import Key
from raw_events import raw_events


@pytest.fixture
def finished(make_config):
    return start_run(make_config("training.num_rounds=1"), "first")


@pytest.mark.parametrize("inner", ["", "model"])
def test_the_new_run_starts_where_the_other_ended(finished, make_config, inner):
    weights = load_model(finished.model).weights
    prepared = prepare(make_config(f"model.start_from={finished.path / inner}", "seed=9"))
    assert prepared.state.weights.keys() == weights.keys()
    assert all(torch.equal(prepared.state.weights[key], value) for key, value in weights.items())


def test_its_first_scores_are_the_others_last_ones_and_workers_agree(finished, make_config):
    def scores(run, number):
        return {e["task"]: e["metrics"] for e in raw_events(run) if e["event"] == "evaluation" and e["round"] == number}

    told = (
        f"model.start_from={finished.path}",
        'sharing.rules=[{"heads.*": task}, {"embeddings.*": fixed}, {"*": all}]',
    )
    runs = [start_run(make_config(*told, f"compute.workers={workers}"), "second") for workers in (0, 2)]
    assert scores(runs[0], 0) == scores(finished, 1)
    states = [load_checkpoint(run.checkpoints) for run in runs]
    assert all(torch.equal(states[0].weights[key], value) for key, value in states[1].weights.items())
    # What is fixed travels to the clients, whose own model starts with another value.
    table = Key("fixed", "embeddings.word_embeddings.weight")
    assert torch.equal(states[0].weights[table], load_model(finished.model).weights[Key("all", table.name)])


def test_another_plan_copies_what_was_shared_and_fewer_tasks_are_fine(finished, make_config):
    weights = load_model(finished.model).weights
    two = "tasks={sentiment: {train_samples: 40}, similarity: {train_samples: 40}}"
    moved = prepare(make_config(two, f"model.start_from={finished.path}", "mode=federated_single_task")).state.weights
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(moved[Key("task:sentiment", name)], weights[Key("all", name)])
    assert torch.equal(moved[Key("task:similarity", name)], weights[Key("all", name)])
    assert not any("paraphrase" in key.name for key in moved)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.server_model=random-2x32"], r"`encoder.layer.1.attention.self.query.weight` is not there in .* and"),
        (
            ["model.server_model=random-1x64"],
            r"`embeddings.word_embeddings.weight` is \(\d+, 32\) in .* and \(\d+, 64\)",
        ),
        (["training.loss_weighting=uncertainty"], "`heads.sentiment.log_variance` is not there in"),
        (["mode=local"], "the sharing plan keeps values at the clients"),
        (["model.start_from=/nowhere"], "model.start_from: /nowhere holds no finished model"),
    ],
)
def test_the_first_difference_is_named(finished, make_config, overrides, words):
    with pytest.raises(ConfigError, match=f"model.start_from: .*{words}" if "start_from" not in words else words):
        prepare(make_config(f"model.start_from={finished.path}", *overrides))


def test_tasks_must_be_the_same(finished, make_config):
    path = finished.model / "tasks.json"
    record = json.loads(path.read_text())
    record["tasks"]["sentiment"]["labels"].reverse()
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"model.start_from: sentiment has the labels \['positive', 'negative'\]"):
        prepare(make_config(f"model.start_from={finished.path}"))
    del record["tasks"]["sentiment"]
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="has no task sentiment, it has paraphrase, similarity"):
        prepare(make_config(f"model.start_from={finished.path}"))
