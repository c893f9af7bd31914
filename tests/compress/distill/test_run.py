import pytest
import torch

from compress.listening import Listener, end_after
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings, LossWeights
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.model.saved import load_model
from fedmtl.runs import energy as energy_module
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.sharing.plan import weights_sha256
from raw_events import raw_events
from small_config import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sizes = (
        f"tasks.{task}={{train_samples: 16, val_samples: 12}}" for task in ("sentiment", "paraphrase", "similarity")
    )
    overrides = ["model.server_model=random-2x32", "training.num_rounds=1", *sizes]
    return start_run(load_config(None, [*SMALL, *overrides, f"output={folder}"]), "teacher")


@pytest.fixture(scope="module")
def whole(teacher):
    """Of another width, so that there are projections to keep."""
    return go(teacher, "whole", student="1x64")


def go(teacher, name, *, resume=False, listener=None, **changes):
    settings = DistillSettings(**{"student": "1x32", "epochs_intermediate": 2, "epochs_prediction": 2, **changes})
    return distill(teacher, load_config(teacher.config), settings, name, listener or Listener(), resume=resume)


def digest(run):
    return weights_sha256(load_model(run.model).weights)


def test_leaves_a_finished_run_of_both_stages(teacher):
    made = go(teacher, "both")
    events = raw_events(made.run)
    summary = summarize(read_events(made.run), "both")
    assert summary.status == "done"
    assert summary.mode == "distilled"
    assert [event.get("stage") for event in events if event["event"] == "round"] == [
        "start", *2 * ["intermediate"], *2 * ["prediction"],
    ]  # fmt: skip
    # Scored before the first pass, at the end of the first stage and after each pass of the second.
    assert [e["round"] for e in events if e["event"] == "evaluation" and e["task"] == "sentiment"] == [0, 2, 3, 4]
    assert summary.weights_sha256 == digest(made.run)
    assert summary.tasks["sentiment"].final["accuracy"] == made.student["sentiment"]
    above = summarize(read_events(teacher), "teacher")
    assert made.teacher["similarity"] == pytest.approx(above.tasks["similarity"].final["pearson"], abs=1e-4)
    assert summary.parameters < above.parameters


def test_says_what_energy_it_took_teacher_and_interruptions_included(teacher, monkeypatch):
    monkeypatch.setattr(energy_module, "SECONDS_BETWEEN_EVENTS", 0.0)
    config = load_config(teacher.config, ["energy.cpu_watts=10", "energy.grams_per_kwh=400"])
    settings = DistillSettings("1x32", epochs_intermediate=1, epochs_prediction=1)
    with monkeypatch.context() as first:
        end_after(1, first)
        with pytest.raises(KeyboardInterrupt):
            distill(teacher, config, settings, "metered", Listener())
    made = distill(teacher, config, settings, "metered", Listener(), resume=True)
    parts = [event for event in raw_events(made.run) if event["event"] == "energy"]
    assert {part["cpu_watts"] for part in parts} <= {10, None}
    total = summarize(read_events(made.run), "metered").energy
    # The start and the first pass, then the second pass and the end.
    assert len(parts) == 4
    assert min(part["cpu_seconds"] for part in parts[:3]) > 0
    assert total.cpu_seconds == pytest.approx(sum(part["cpu_seconds"] for part in parts))
    assert total.grams_co2 == pytest.approx(total.cpu_joules / 3.6e6 * 400)


def test_the_same_settings_give_the_same_bits_and_labels_may_join_in(teacher, whole):
    assert digest(go(teacher, "again", student="1x64").run) == digest(whole.run)
    assert digest(go(teacher, "gold", student="1x64", weights=LossWeights(gold=0.5)).run) != digest(whole.run)


@pytest.mark.parametrize("passes", [1, 3])
def test_goes_on_after_the_last_whole_pass(teacher, whole, monkeypatch, passes):
    end_after(passes, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        go(teacher, f"cut-{passes}", student="1x64")
    monkeypatch.undo()
    with pytest.raises(FedmtlError, match="other settings"):
        go(teacher, f"cut-{passes}", student="1x64", temperature=2.0, resume=True)
    resumed = go(teacher, f"cut-{passes}", student="1x64", resume=True)
    assert digest(resumed.run) == digest(whole.run)
    assert resumed.student == whole.student
    rounds = [event["round"] for event in raw_events(resumed.run) if event["event"] == "round"]
    assert rounds == [0, 1, 2, 3, 4]


def test_the_student_comes_nearer_to_its_teacher(teacher):
    listener = Listener()
    settings = {"start": "random", "epochs_intermediate": 6, "epochs_prediction": 6}
    go(teacher, "nearer", listener=listener, rate_intermediate=3e-3, rate_prediction=3e-3, **settings)
    for stage in ("intermediate", "prediction"):
        own = [update.losses["total"] for update in listener.updates if update.stage == stage]
        assert own[-1] < 0.7 * own[0], own
    assert [update.share for update in listener.updates][-1] == 1.0


def test_stage_one_leaves_the_heads_alone(teacher):
    made = go(teacher, "inner", stages="intermediate")
    above, below = (load_model(run.model).weights for run in (teacher, made.run))
    changed = {
        key.name for key in below if key.name in {k.name for k in above} and not torch.equal(above[key], below[key])
    }
    assert changed
    assert not [name for name in changed if name.startswith("heads.")]


def test_other_tokens_leave_the_prediction_stage(teacher):
    listener = Listener()
    made = go(teacher, "tiny", student="tiny", epochs_prediction=1, listener=listener)
    assert any("only the prediction stage" in line for line in listener.lines)
    assert {event.get("stage") for event in raw_events(made.run)} == {None, "start", "prediction"}
    with pytest.raises(FedmtlError, match="write --stages prediction"):
        go(teacher, "refused", student="tiny", stages="intermediate")


def test_the_students_encoder_starts_a_federation_taught_by_the_same_teacher(teacher):
    made = go(teacher, "encoder", epochs_prediction=1)
    config = load_config(made.run.config, [
        f"training.distillation={{teacher: {teacher.path}, weight: 1.0}}", "training.num_rounds=1",
    ])  # fmt: skip
    federated = start_run(config, "federated")
    assert load_model(federated.model).encoder.module.config.num_hidden_layers == 1
    assert summarize(read_events(federated)).status == "done"


def test_a_distilled_run_is_not_resumed_as_a_federation(teacher):
    made = go(teacher, "not-federated", stages="prediction", epochs_prediction=1)
    with pytest.raises(FedmtlError, match="was distilled"):
        resume_run(made.run)
