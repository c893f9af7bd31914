"""A student that is pruned while it learns."""

import pytest
import torch

from compress.listening import Listener, end_after
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.model.saved import load_model
from fedmtl.sharing.plan import weights_sha256
from fedmtl.sharing.weights import linear_weights
from raw_events import raw_events
from small_config import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

PRUNING = ["training.num_rounds=4", "training.pruning={amount: 0.4, rounds: 2, start_round: 2}"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    sizes = (f"tasks.{task}={{train_samples: 16, val_samples: 12}}" for task in ("sentiment", "similarity"))
    tasks = [setting for setting in SMALL if "paraphrase" not in setting]
    smaller = ("model.server_model=random-2x32", "training.num_rounds=1", f"output={tmp_path_factory.mktemp('runs')}")
    config = load_config(None, [*tasks, *sizes, *smaller])
    return start_run(config, "teacher")


def go(teacher, name, overrides=PRUNING, *, resume=False, **changes):
    settings = DistillSettings(**{"student": "1x32", "epochs_intermediate": 2, "epochs_prediction": 2, **changes})
    return distill(teacher, load_config(teacher.config, overrides), settings, name, Listener(), resume=resume)


def zeros(run):
    """The share of zeros in the linear weights of a saved model, and in its token table."""
    saved = load_model(run.model)
    linear = linear_weights(saved.model)
    values = torch.cat([value.reshape(-1) for key, value in saved.weights.items() if key.name in linear])
    table = next(value for key, value in saved.weights.items() if key.name.endswith("word_embeddings.weight"))
    return float((values == 0).float().mean()), int((table == 0).sum())


@pytest.fixture(scope="module")
def pruned(teacher):
    return go(teacher, "pruned").run


def test_the_student_is_pruned_over_the_passes_of_both_stages(pruned):
    share, in_table = zeros(pruned)
    assert share == pytest.approx(0.4, abs=1e-4)
    assert in_table < 100
    events = [event for event in raw_events(pruned) if event["event"] == "pruning"]
    assert [event["round"] for event in events] == [0, 1, 2, 3, 4]
    # From pass 2 on, half of the share each: pass 2 ends the intermediate stage, pass 3 begins the other.
    assert [event["target"] for event in events] == pytest.approx([0, 0, 0.2, 0.4, 0.4])
    found = [event["linear"]["zeros"] / event["linear"]["weights"] for event in events]
    assert found == pytest.approx([0, 0, 0.2, 0.4, 0.4], abs=1e-3)


def test_without_the_setting_nothing_is(teacher):
    made = go(teacher, "dense", []).run
    assert zeros(made)[0] < 1e-3
    assert not [event for event in raw_events(made) if event["event"] == "pruning"]


@pytest.mark.parametrize("passes", [2, 3])
def test_a_resume_goes_on_with_the_masks(teacher, pruned, monkeypatch, passes):
    end_after(passes, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        go(teacher, f"cut-{passes}")
    monkeypatch.undo()
    resumed = go(teacher, f"cut-{passes}", resume=True).run
    first, second = (weights_sha256(load_model(run.model).weights) for run in (resumed, pruned))
    assert first == second


def test_from_the_start_means_before_the_first_pass(teacher):
    first = ["training.num_rounds=4", "training.pruning={amount: 0.3, rounds: 1, start_round: 0}"]
    made = go(teacher, "at-once", first, stages="prediction").run
    events = [event for event in raw_events(made) if event["event"] == "pruning"]
    assert events[0]["linear"]["zeros"] / events[0]["linear"]["weights"] == pytest.approx(0.3, abs=1e-3)
    assert zeros(made)[0] == pytest.approx(0.3, abs=1e-4)


def test_passes_that_are_too_few_are_one_clear_line(teacher):
    with pytest.raises(ConfigError, match="a pass is a round here, and there are 2: write fewer") as error:
        go(teacher, "too-few", stages="prediction")
    assert "\n" not in str(error.value)
