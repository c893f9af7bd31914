"""Whole runs that prune: what is zero stays zero on every way a weight can take."""

from __future__ import annotations

import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.methods.pruning import pruned_weights
from fedmtl.model.saved import load_model
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import Key, weights_sha256
from fedmtl.sharing.weights import linear_weights
from raw_events import raw_events

PRUNING = "training.pruning={amount: 0.5, rounds: 2, start_round: 0}"
ONE_TASK = ("tasks={sentiment: {train_samples: 40, val_samples: 24}}", "federation.clients_per_task=3")
ROUNDS = ("training.num_rounds=3", "checkpoint.every=1")


def digest(run: RunFolder) -> str:
    return weights_sha256(load_checkpoint(run.checkpoints).weights)


def check_sparse(run: RunFolder, last: int = 3) -> None:
    """Half of the linear weights from round 1 on, and the same ones for ever."""
    states = {number: load_checkpoint(run.checkpoints, number) for number in range(last + 1)}
    model = load_model(run.model)
    names = set(linear_weights(model.model))
    total = sum(value.numel() for key, value in states[last].weights.items() if key.name in names)
    for number, state in states.items():
        masks = pruned_weights(state)
        assert sum(int(mask.sum()) for mask in masks.values()) == round(total * (0.25 if number == 0 else 0.5))
        assert all(not state.weights[key][mask].any() for key, mask in masks.items())
        assert all((pruned_weights(states[last])[key] | ~mask).all() for key, mask in masks.items())
    assert all(not model.weights[key][mask].any() for key, mask in pruned_weights(states[last]).items())
    moved = [
        (states[last].weights[key] != states[1].weights[key])[~mask].float().mean()
        for key, mask in pruned_weights(states[last]).items()
    ]
    assert min(moved) > 0.5


@pytest.mark.parametrize(
    "overrides",
    [
        ["federation.server_optimizer={kind: fedadam, learning_rate: 0.01}"],
        ["wire.down=int8", "wire.up=int8", "training.proximal=0.1"],
        ["wire.up=topk", "wire.topk_share=0.7", "federation.server_optimizer.kind=fedavgm"],
        ["training.optimizer=sgd", "training.momentum=0.9", "training.keep_optimizer=true"],
        ["mode=centralized"],
    ],
    ids=["fedadam", "int8", "topk", "kept_momentum", "centralized"],
)
def test_pruned_weights_stay_zero_through_a_federation(make_config, overrides):
    check_sparse(start_run(make_config(PRUNING, *ONE_TASK, *ROUNDS, *overrides), "pruned"))


def test_the_event_tells_linear_layers_from_all_weights(make_config):
    run = start_run(make_config(PRUNING, *ONE_TASK, *ROUNDS), "pruned")
    events = [event for event in raw_events(run) if event["event"] == "pruning"]
    assert [event["round"] for event in events] == [0, 1, 2, 3]
    assert [event["target"] for event in events] == [0.25, 0.5, 0.5, 0.5]
    last, state = events[-1], load_checkpoint(run.checkpoints)
    # One layer, 32 wide: 4 * 32 * 32 + 2 * 32 * 128 = 12288 and two rows of the head, 64; the half is 6176.
    assert last["linear"] == {"weights": 12352, "zeros": 6176}
    assert last["pruned"] == 6176
    assert last["all"]["weights"] == sum(value.numel() for value in state.weights.values())
    assert last["all"]["zeros"] == sum(int((value == 0).sum()) for value in state.weights.values())
    assert "zero: 50.0% of the linear layers" in run.report.read_text()


def test_workers_and_resume_give_the_same_bits(make_config):
    # What is pruned after the last round follows from the masks and the residuals of those before.
    pruning = "training.pruning={amount: 0.5, rounds: 3}"
    told = (pruning, *ROUNDS, "wire.down=int8", "wire.up=int8", "federation.server_optimizer.kind=fedavgm")
    whole = start_run(make_config(*told), "whole")
    expected = load_checkpoint(whole.checkpoints)
    assert digest(start_run(make_config(*told, "compute.workers=2"), "workers")) == weights_sha256(expected.weights)
    for path in whole.checkpoints.glob("round-0003*"):
        path.unlink()
    again = load_checkpoint(resume_run(whole).checkpoints)
    assert again.round == 3
    assert weights_sha256(again.weights) == weights_sha256(expected.weights)
    assert all(torch.equal(pruned_weights(again)[key], mask) for key, mask in pruned_weights(expected).items())


def test_a_stopped_head_is_left_as_its_best_round_had_it(make_config):
    told = ("tasks.sentiment.patience=1", "training.num_rounds=6", "checkpoint.every=1")
    run = start_run(make_config("training.pruning={amount: 0.9, rounds: 6}", *ONE_TASK, *told), "stopped")
    [stop] = [event for event in raw_events(run) if event["event"] == "early_stop"]
    name = "heads.sentiment.weight"
    best = load_checkpoint(run.checkpoints, stop["best_round"]).weights[Key("task:sentiment", name)]
    state = load_checkpoint(run.checkpoints)
    assert torch.equal(state.weights[Key("task:sentiment", name)], best)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mode=local"], "training.pruning: found with mode local"),
        (["model.lora={}"], "training.pruning: found with model.lora"),
        (["sharing.adaptive={}"], "training.pruning: found with sharing.adaptive"),
        (["training.num_rounds=0"], r"training.pruning.rounds: found 2 from start_round 0, that is up to round 1"),
        (["training.pruning.layers=[nowhere]"], "training.pruning.layers: `nowhere` matches no linear weight"),
    ],
)
def test_what_cannot_be_pruned_is_told(make_config, overrides, words):
    with pytest.raises(ConfigError, match=words):
        prepare(make_config(PRUNING, *overrides))


def test_a_run_without_pruning_has_no_word_of_it(make_config):
    run = start_run(make_config(*ONE_TASK, "training.num_rounds=1"), "plain")
    assert not any(event["event"] == "pruning" for event in raw_events(run))
    assert "pruning" not in load_checkpoint(run.checkpoints).extra
    assert "Sparsity" not in run.report.read_text()
