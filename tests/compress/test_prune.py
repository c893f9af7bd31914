import shutil
from pathlib import Path

import pytest
import torch

from compress.listening import Listener
from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.prune import prune_run
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.model.saved import load_model
from fedmtl.predict.run import load_run
from fedmtl.sharing.plan import Key, weights_sha256
from raw_events import raw_events
from small_config import SMALL


@pytest.fixture
def finished(make_config):
    told = ("training.local_epochs=2", "training.num_rounds=1", "model.server_model=random-2x32")
    rules = 'sharing.rules=[{"heads.*": task}, {"encoder.layer.1.*": task}, {"*": all}]'
    return start_run(make_config(*told, rules), "first")


def test_a_pruned_run_goes_on_from_the_model_for_so_many_epochs(finished):
    config = prune_run(finished, Cut(amount=0.3), 3, ["training.learning_rate=2e-3"]).config
    training = config.training
    assert (training.num_rounds, training.local_epochs, training.learning_rate) == (3, 1, 2e-3)
    # Thirds of it before every epoch, so that what is left trains after the last.
    assert (training.pruning.amount, training.pruning.rounds, training.pruning.start_round) == (0.3, 3, 0)
    assert (Path(config.model.start_from), Path(config.output)) == (finished.model, finished.path.parent)
    # A section that is set as a whole has no amount, which is the command's.
    replaced = prune_run(finished, Cut(amount=0.3), 3, ["training.pruning={schedule: cubic, rounds: 2}"]).config
    assert (replaced.training.pruning.amount, replaced.training.pruning.schedule) == (0.3, "cubic")
    run = start_run(config, "second")
    [*_, last] = [event for event in raw_events(run) if event["event"] == "pruning"]
    assert last["pruned"] == round(0.3 * last["linear"]["weights"]) <= last["linear"]["zeros"]
    zeros = sum(int((value == 0).sum()) for value in load_model(run.model).weights.values())
    assert zeros == last["all"]["zeros"]


def test_a_cut_run_has_a_smaller_encoder_and_trains(finished):
    pruned = prune_run(finished, Cut(ffn=0.5, layers=1), 1)
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


@pytest.fixture(scope="module")
def fewer_heads(tmp_path_factory):
    """Of two clients; the prepared run, and the finished one."""
    told = (
        "model.server_model=random-2x128", "training.num_rounds=1",
        "tasks={sentiment: {train_samples: 24, val_samples: 12}}", f"output={tmp_path_factory.mktemp('runs')}",
    )  # fmt: skip
    first = start_run(load_config(None, [*SMALL, *told]), "first")
    pruned = prune_run(first, Cut(heads=0.5, ffn=0.5, amount=0.2), 2, ["checkpoint.every=1"])
    return pruned, start_run(pruned.config, "second")


def test_a_run_with_fewer_heads_federates(fewer_heads):
    pruned, run = fewer_heads
    # One of two heads, 64 wide, and 256 of 512 neurons, in each of two layers: 64 * (3 * 129 + 128) + 256 * 257.
    assert pruned.parameters[0] - pruned.parameters[1] == 2 * (64 * (3 * 129 + 128) + 256 * 257)
    [*_, last] = [event for event in raw_events(run) if event["event"] == "round"]
    assert last["clients"] == 2
    trained, start = load_model(run.model), load_model(Path(pruned.config.model.start_from))
    assert trained.model.layout.num_heads == 1
    query = Key("all", "encoder.layer.0.attention.self.query.weight")
    assert not torch.equal(start.weights[query], trained.weights[query])


def test_a_run_with_fewer_heads_resumes_to_the_same_bits(fewer_heads):
    _, run = fewer_heads
    expected = weights_sha256(load_model(run.model).weights)
    for path in run.checkpoints.glob("round-0002*"):
        path.unlink()
    shutil.rmtree(run.model)
    assert weights_sha256(load_model(resume_run(run).model).weights) == expected


def test_a_run_with_fewer_heads_teaches_a_student_of_as_many(fewer_heads):
    _, run = fewer_heads
    settings = DistillSettings(student="1x128", epochs_intermediate=1, epochs_prediction=1, attention="scores")
    student = load_model(distill(run, load_config(run.config), settings, "student", Listener()).run.model)
    assert (student.model.layout.num_heads, student.model.layout.head_size) == (1, 64)


def test_no_epochs_only_prune_and_score(finished):
    run = start_run(prune_run(finished, Cut(amount=0.5, ffn=0.25), 0).config, "second")
    events = raw_events(run)
    assert {event["round"] for event in events if event["event"] == "evaluation"} == {0}
    [pruning] = [event for event in events if event["event"] == "pruning"]
    assert pruning["pruned"] == round(0.5 * pruning["linear"]["weights"])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(Cut(), "prune: nothing to take out"), (Cut(ffn=1.0), "--ffn: found 1, it must be"),
     (Cut(amount=-0.1), "--amount: found -0.1, it must be"), (Cut(heads=1.0), "--heads: found 1, it must be")],
)  # fmt: skip
def test_what_cannot_be_pruned_is_told(finished, wanted, words):
    with pytest.raises(ConfigError, match=words):
        prune_run(finished, wanted, 2)
