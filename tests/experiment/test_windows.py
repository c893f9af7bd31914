"""Runs whose texts are read in windows: what is bit-identical, scored, answered, compressed and refused."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from experiment.test_multilabel import write_moods
from fedmtl.cli.app import app
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.predict.run import evaluate_validation, load_run, predict_texts
from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import BaselineEvent, DataEvent, EndEvent, RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from outcomes import digest, scores

LENGTH = 12
BASE = (
    "defaults=plain",
    "model.server_model=random-1x32",
    f"model.max_length={LENGTH}",
    "model.windows={stride: 5, pool: attention}",
    "model.pair=dual",
    "federation.clients_per_task=2",
    "training.num_rounds=2",
    "training.batch_size=8",
    "training.learning_rate=3e-3",
    "compute.workers=0",
    "compute.device=cpu",
)
TASKS = (
    "tasks.sentiment={train_samples: 40, val_samples: 20}",
    "tasks.similarity={train_samples: 40, val_samples: 20}",
)
WORDS = ("tasks.roles={train_samples: 60, val_samples: 30}",)


@pytest.fixture
def run(tmp_path):
    def made(name, *overrides, tasks=TASKS):
        return start_run(load_config(None, [*BASE, *tasks, f"output={tmp_path}", *overrides]), name)

    return made


def test_the_end_of_a_long_text_is_read(run):
    folder = run("one", "training.num_rounds=1")
    loaded = load_run(folder)
    # The first words are alike: without windows so are the answers.
    text = "the film was long and the plot was not very good and the cook was here"
    rows = [(f"{text} {last}",) for last in ("boring", "wonderful")]
    (first,), (second,) = predict_texts(loaded, rows, ["sentiment"])
    assert first.probabilities != second.probabilities
    cut = load_run(run("cut", "training.num_rounds=1", "model.windows=null"))
    (first,), (second,) = predict_texts(cut, rows, ["sentiment"])
    assert first.probabilities == second.probabilities


def test_what_is_cut_and_read_in_windows_is_counted(run):
    folder = run(
        "one", "training.num_rounds=1", "model.max_length=8", "model.windows={stride: 3, most: 2}", tasks=TASKS[:1]
    )
    data = first_of(read_events(folder), DataEvent)
    plain = first_of(read_events(run("plain", "training.num_rounds=1", "model.max_length=128", "model.windows=null",
                                     tasks=TASKS[:1])), DataEvent)  # fmt: skip
    # Texts in two windows, each eight tokens; those of more than eleven are cut behind the second.
    assert data.windows == 2 * data.windowed > 0
    assert 0 < data.truncated < data.windowed
    assert (data.most_windows, data.max_length, plain.windowed, plain.truncated) == (2, 8, None, 0)
    assert data.tokens > 16 * data.windowed


@pytest.mark.slow  # Starts two workers, which import torch.
def test_workers_give_the_same_bits(run):
    alone, others = run("alone", tasks=(*TASKS, *WORDS)), run("others", "compute.workers=2", tasks=(*TASKS, *WORDS))
    assert digest(alone) == digest(others)
    assert scores(alone) == scores(others)


def test_a_run_that_was_killed_goes_on_to_the_same_bits(run, tmp_path):
    whole = run("whole")

    def interrupt(event):
        if isinstance(event, RoundEvent) and event.round == 1:
            raise MemoryError("killed")

    with pytest.raises(MemoryError):
        start_run(load_config(None, [*BASE, *TASKS, f"output={tmp_path}"]), "killed", interrupt)
    resumed = resume_run(RunFolder(tmp_path / "killed"))
    assert digest(resumed) == digest(whole)
    assert scores(resumed) == scores(whole)


def test_scores_at_clients_are_those_at_the_server(run):
    at_clients, at_server = run("clients", "evaluation.where=clients"), run("server")
    assert digest(at_clients) == digest(at_server)
    for key, found in scores(at_clients).items():
        assert found["loss"] == pytest.approx(scores(at_server)[key]["loss"], rel=1e-6)


def test_a_stack_gives_the_weights_of_its_clients_one_by_one(run):
    tasks, still = (*TASKS, *WORDS), ("model.encoder_dropout=0", "model.head_dropout=0", "training.optimizer=sgd")
    alone = run("alone", *still, tasks=tasks)
    stacked = run("stacked", *still, "compute={stack: 3, precision: fp32}", tasks=tasks)
    ours, theirs = (load_run(folder).saved.weights for folder in (stacked, alone))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key].numpy(), value.numpy(), rtol=0, atol=1e-6, err_msg=str(key))


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.smart={weight: 1}",),
        ("training.gradients=pcgrad", "training.task_schedule=joint", "mode=centralized"),
        ("mode=federated_single_task",),
        ("mode=centralized_single_task",),
        ("mode=local",),
        ("model.lora={rank: 2}",),
        ("model.adapters={kind: pals, size: 8, heads: 2}",),
        ("model.pair=cross",),
        ("model.windows.pool=max", "tasks.sentiment.head={hidden: 16}", "training.loss_weighting=uncertainty"),
        ("federation.server_optimizer.kind=fedavgm", "sharing.adaptive={}"),
        ("training.pruning={amount: 0.3, rounds: 1}", "training.proximal=0.1"),
        ("wire.up=int8", "methods.scaffold={}"),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0] + overrides[0].partition("=")[2][:20],
)
def test_it_goes_together_with(run, overrides):
    folder = run("with", "training.num_rounds=1", "training.local_epochs=3", "training.head_rate=5", *overrides)
    found = scores(folder)
    assert found[1, "sentiment"]["loss"] < found[0, "sentiment"]["loss"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.smart={weight: 1}",),
        ("model.lora={rank: 2}",),
        ("model.adapters={kind: pals, size: 8, heads: 2}",),
    ],
    ids=str,
)
def test_words_are_tagged_in_windows_with(run, overrides):
    folder = run("with", "training.num_rounds=1", "training.local_epochs=3", *overrides, tasks=WORDS)
    found = scores(folder)
    assert found[1, "roles"]["loss"] < found[0, "roles"]["loss"]


@pytest.mark.parametrize("compute", ["stack: 0", "stack: 2, precision: fp32"])
def test_texts_with_several_labels_are_read_in_windows(run, tmp_path, compute):
    train, dev = write_moods(tmp_path, "train", 60, 1), write_moods(tmp_path, "dev", 30, 2)
    task = f"tasks.moods={{kind: multilabel, source: {{train: {train}, validation: {dev}}}}}"
    more = (
        "training.num_rounds=1",
        "training.local_epochs=4",
        "model.max_length=8",
        "model.windows={stride: 4, pool: max}",
    )
    folder = run("moods", *more, f"compute={{{compute}}}", tasks=(task,))
    found = scores(folder)
    assert found[1, "moods"]["loss"] < found[0, "moods"]["loss"]
    assert first_of(read_events(folder), DataEvent).windowed > 0
    assert load_run(folder).saved.tasks["moods"].fitted


def test_words_behind_the_first_tokens_are_scored(run):
    """Recall counts every span of the text: without windows those behind twelve tokens can only be missed."""
    folder = run("one", "training.num_rounds=1", tasks=WORDS)
    data = first_of(read_events(folder), DataEvent)
    assert data.windowed > 0
    assert data.truncated == 0
    assert evaluate_validation(load_run(folder), "roles")["roles"].metrics["f1"] == pytest.approx(
        scores(folder)[1, "roles"]["f1"]
    )


def test_updates_under_masks_have_windows(run):
    masked = ("privacy.secure_aggregation={}", "federation.clients_per_task=3", "evaluation.where=clients")
    folder = run("masked", "training.num_rounds=1", "federation.vocabulary_slices=false", *masked, tasks=TASKS[:1])
    plain = run("plain", "training.num_rounds=1", "federation.vocabulary_slices=false", *masked[1:], tasks=TASKS[:1])
    found, expected = scores(folder)[1, "sentiment"], scores(plain)[1, "sentiment"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_noise_at_clients_goes_along(run):
    alike = "federation={vocabulary_slices: false, average: uniform}"
    folder = run("noisy", "training.num_rounds=1", "privacy.client={noise_multiplier: 0.5}", alike, tasks=TASKS[:1])
    events = read_events(folder)
    assert first_of(events, EndEvent).status == "done"
    assert first_of(events, RoundEvent).failures == 0


def test_noise_on_gradients_is_refused_by_name(run):
    with pytest.raises(ConfigError, match=r"model\.windows: found with privacy\.example.*windows: null"):
        run("refused", "privacy.example={noise_multiplier: 1}", "federation.vocabulary_slices=false")


@pytest.mark.parametrize("where", ["clients", "server"])
def test_a_student_learns_from_a_teacher_that_reads_windows(run, where, tmp_path):
    teacher = run("teacher", tasks=TASKS[:1])
    texts = tmp_path / "texts.txt"
    texts.write_text("the film was long and the plot was not very good and the cook was here\n" * 4)
    server = f"where: server, texts: [{texts}], tasks: [sentiment], steps: 2" if where == "server" else "weight: 1"
    given = f"training.distillation={{teacher: {teacher.path}, {server}}}"
    for name, windows in (("windows", "{stride: 5}"), ("none", "null")):
        small = "model.server_model=random-1x16", f"model.windows={windows}"
        student = run(name, "training.num_rounds=1", *small, given, tasks=TASKS[:1])
        assert scores(student)[1, "sentiment"]["loss"] < scores(student)[0, "sentiment"]["loss"]


def test_baselines_are_computed(run):
    folder = run("one", "training.num_rounds=1", "evaluation.baselines=[constant, tfidf, frozen]", tasks=TASKS[:1])
    found = {event.name for event in events_of(read_events(folder), BaselineEvent)}
    assert found == {"constant", "tfidf", "frozen"}


def test_the_command_says_how_many_texts_have_windows(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        word for each in (*BASE, TASKS[0], "training.num_rounds=1", "model.max_length=8") for word in ("--set", each)
    ]
    result = CliRunner().invoke(app, ["run", "--name", "one", *overrides])
    assert result.exit_code == 0, result.output
    data = first_of(read_events(RunFolder(tmp_path / "runs" / "one")), DataEvent)
    assert f"{data.windowed} of more than 8 tokens in {data.windows} windows" in " ".join(result.output.split())
    report = RunFolder(tmp_path / "runs" / "one").report.read_text()
    assert f"{data.windowed} in {data.windows} windows" in report


@pytest.mark.slow
def test_a_model_with_windows_is_compressed_and_measured(run, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    folder = run("teacher")
    call = CliRunner().invoke

    def done(*words):
        result = call(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.output

    done("export", folder.path, "--to", "onnx", "--out", "bundle")
    done("quantize", "bundle")
    text = "the film was long and the plot was not very good and the cook was here"
    ours, onnx = (
        json.loads(done("predict", model, "--json", text))["predictions"] for model in (folder.path, "bundle")
    )
    assert ours[0]["probabilities"] == pytest.approx(onnx[0]["probabilities"], abs=1e-5)
    int8 = json.loads(done("predict", next((tmp_path / "bundle").glob("model.*.onnx")), "--json", text))["predictions"]
    assert int8[0]["probabilities"] == pytest.approx(onnx[0]["probabilities"], abs=0.1)
    done("evaluate", folder.path)
    done("prune", folder.path, "--ffn", "0.5", "--epochs", "1", "--out", "fewer")
    passes = ("--epochs-intermediate", "1", "--epochs-prediction", "1")
    done("distill", folder.path, "--student", "1x16", "--name", "small", *passes)
    for name in ("fewer", "small"):
        assert load_run(RunFolder(tmp_path / name)).saved.tasks["sentiment"].windows is not None
