from pathlib import Path

import pytest
import torch

from fedmtl.compress.prune import Wanted, prune_run
from fedmtl.errors import ConfigError
from fedmtl.experiment.inference import load_run
from fedmtl.experiment.run import start_run
from fedmtl.model.saved import load_model
from fedmtl.runs import read_events


@pytest.fixture
def finished(make_config):
    told = ("training.local_epochs=2", "training.num_rounds=1", "model.server_model=random-2x32")
    rules = 'sharing.rules=[{"heads.*": task}, {"encoder.layer.1.*": task}, {"*": all}]'
    return start_run(make_config(*told, rules), "first")


def test_a_pruned_run_goes_on_from_the_model_for_so_many_epochs(finished):
    config = prune_run(finished, Wanted(amount=0.3), 3, ["training.learning_rate=2e-3"]).config
    training = config.training
    assert (training.num_rounds, training.local_epochs, training.learning_rate) == (3, 1, 2e-3)
    # Thirds of it before every epoch, so that what is left trains after the last.
    assert (training.pruning.amount, training.pruning.rounds, training.pruning.start_round) == (0.3, 3, 0)
    assert (Path(config.model.start_from), Path(config.output)) == (finished.model, finished.path.parent)
    run = start_run(config, "second")
    [*_, last] = [event for event in read_events(run) if event["event"] == "pruning"]
    assert last["pruned"] == round(0.3 * last["linear"]["weights"]) <= last["linear"]["zeros"]
    zeros = sum(int((value == 0).sum()) for value in load_model(run.model).weights.values())
    assert zeros == last["all"]["zeros"]


def test_a_cut_run_has_a_smaller_encoder_and_trains(finished):
    pruned = prune_run(finished, Wanted(ffn=0.5, layers=1), 1)
    assert pruned.parameters[1] < pruned.parameters[0]
    # The rule of the layer that is gone would match nothing.
    assert pruned.config.sharing.rules == [{"heads.*": "task"}, {"*": "all"}]
    run = start_run(pruned.config, "second")
    loaded = load_run(run)
    config = loaded.saved.encoder.module.config
    assert (config.num_hidden_layers, config.intermediate_size) == (1, 64)
    start = load_model(Path(pruned.config.model.start_from)).weights
    assert start.keys() == loaded.saved.weights.keys()
    assert any(not torch.equal(value, loaded.saved.weights[key]) for key, value in start.items())


def test_no_epochs_only_prune_and_score(finished):
    run = start_run(prune_run(finished, Wanted(amount=0.5, ffn=0.25), 0).config, "second")
    events = read_events(run)
    assert {event["round"] for event in events if event["event"] == "evaluation"} == {0}
    [pruning] = [event for event in events if event["event"] == "pruning"]
    assert pruning["pruned"] == round(0.5 * pruning["linear"]["weights"])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(Wanted(), "prune: nothing to take out"), (Wanted(ffn=1.0), "--ffn: found 1, it must be"),
     (Wanted(amount=-0.1), "--amount: found -0.1, it must be")],
)  # fmt: skip
def test_what_cannot_be_pruned_is_told(finished, wanted, words):
    with pytest.raises(ConfigError, match=words):
        prune_run(finished, wanted, 2)
