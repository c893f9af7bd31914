"""Runs whose model has LoRA and adapters added: what travels, what resumes, and what a finished one answers."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.export.hf import export_hf
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.predict.run import evaluate_validation, load_run, predict_texts
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events

CROSS = ["model.pair=cross", "model.pool=cls"]
LORA = ["model.lora.rank=2", "model.lora.dropout=0.1"]
PALS = ["model.adapters={size: 8, heads: 2, share: projections, tasks: [sentiment, paraphrase]}"]
ROWS = [("the film was fine",), ("a very long and dull night at the movies",), ("no",)]


def events(run, kind):
    return [event for event in raw_events(run) if event["event"] == kind]


def digest(run):
    return events(run, "end")[0]["weights_sha256"]


def moved(run, config):
    """Names of the values that the run changed."""
    state, start = load_checkpoint(run.checkpoints), prepare(config).state.weights
    return {key.name for key in start if not torch.equal(state.weights[key], start[key])}


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ([], ("lora", "heads")),
        (["model.lora.mode=last_linear"], ("lora",)),
        (["model.lora.train=b"], ("lora_B", "heads")),
    ],
    ids=["adapters", "last_linear", "b"],
)
def test_only_what_trains_travels_from_the_first_round_on(make_config, lora, parts):
    config = make_config(*CROSS, *LORA, *lora, "training.num_rounds=1")
    run = start_run(config, "run")
    [plan] = events(run, "plan")
    [names] = [{key.name for key in prepare(config).state.weights if key.scope != "fixed"}]
    assert names == {name for name in names if any(part in name for part in parts)}
    assert moved(run, config) == names
    sizes = {key: value.numel() for key, value in prepare(config).state.weights.items() if key.scope != "fixed"}
    assert plan["trainable"] == sum(sizes.values()) < plan["total"] / 10
    for update in events(run, "update"):
        [task] = update["tasks"]
        own = 4 * sum(size for key, size in sizes.items() if key.scope in ("all", f"task:{task}"))
        # the values themselves, and a header that names them and digests of the fixed ones
        assert own < update["bytes_up"] < own + 1500
        assert own < update["bytes_down"] < own + 2500


@pytest.mark.slow
def test_lora_with_pals_is_the_same_with_workers_and_when_killed_and_resumed(make_config, monkeypatch):
    config = [*CROSS, *LORA, *PALS, "training.num_rounds=2"]
    whole = start_run(make_config(*config), "whole")
    assert not events(whole, "failure")
    workers = start_run(make_config(*config, "compute.workers=2"), "workers")
    assert digest(workers) == digest(whole)

    class Killed(BaseException):
        pass

    original, calls = sys.modules["fedmtl.experiment.run"].append_results, iter(range(9))

    def dying(*args):
        if next(calls) == 2:
            raise Killed
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr("fedmtl.experiment.run.append_results", dying)
        with pytest.raises(Killed):
            start_run(make_config(*config), "killed")
    resumed = resume_run(RunFolder(whole.path.parent / "killed"))
    assert digest(resumed) == digest(whole)


def test_a_task_that_is_stopped_keeps_the_adapters_of_its_best_round(make_config):
    patient = ["tasks.sentiment.patience=1", "training.learning_rate=1e-2", "training.num_rounds=3", "seed=2"]
    config = make_config(*CROSS, *PALS, *patient, "checkpoint.every=1")
    run = start_run(config, "run")
    [stop] = events(run, "early_stop")
    end, best = load_checkpoint(run.checkpoints), load_checkpoint(run.checkpoints, stop["best_round"])
    own = [key for key in end.weights if key.name.startswith(("adapters.sentiment.", "heads.sentiment."))]
    assert {key.scope for key in own} == {"task:sentiment"}
    assert end.plan.stopped == ("sentiment",)
    assert all(torch.equal(end.weights[key], best.weights[key]) for key in own)
    assert {key.scope for key in end.weights if key.name.startswith("adapters.paraphrase.")} == {"task:paraphrase"}
    assert 0 < stop["best_round"] < stop["round"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from fedmtl.config.file import load_config
    from small_config import SMALL

    changes = [*CROSS, *LORA, *PALS, "model.lora.mode=last_linear", "model.adapters.tasks=[sentiment]"]
    out = tmp_path_factory.mktemp("finished")
    return start_run(load_config(None, [*SMALL, *changes, "training.learning_rate=1e-2", f"output={out}"]), "run")


def test_a_finished_run_is_scored_as_it_was(finished):
    scores = evaluate_validation(load_run(finished))
    told = {event["task"]: event["metrics"] for event in events(finished, "evaluation") if event["round"] == 2}
    for task, metrics in told.items():
        assert scores[task].metrics == pytest.approx(metrics, abs=1e-5)


def test_each_task_predicts_with_its_own_adapters(finished):
    loaded = load_run(finished)
    bound, tokenizer = loaded.bound, loaded.saved.encoder.tokenizer
    alone = [predict_texts(loaded, [row], ["sentiment"])[0][0].probabilities for row in ROWS]
    together = predict_texts(loaded, ROWS, ["sentiment"])
    for one, (several,) in zip(alone, together, strict=True):
        assert several.probabilities == pytest.approx(one, abs=1e-5)
    encoded = tokenizer([row[0] for row in ROWS], padding=True, return_tensors="pt", return_token_type_ids=True)
    from fedmtl.model.multitask import Inputs

    inputs = Inputs(encoded["input_ids"], encoded["attention_mask"], encoded["token_type_ids"])
    hidden = [bound.use(task).encode(task, inputs)[0] for task in ("sentiment", "paraphrase")]
    assert not torch.allclose(*hidden, atol=1e-4)


@torch.inference_mode()
def test_export_merges_lora_and_has_adapters_in_a_modelling_file(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load_run(finished)
    made = export_hf(loaded.saved, loaded.bound, tmp_path)
    assert made.reasons == {"sentiment": "has adapters (`model.adapters`)"}
    written = made.folders
    own = AutoModel.from_pretrained(written["sentiment"], trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(written["sentiment"], trust_remote_code=True)
    texts = ["the film was fine", "a much longer answer which is padded"]
    for found, (ours,) in zip(
        own.answer(tokenizer, texts), predict_texts(loaded, [(text,) for text in texts], ["sentiment"]), strict=True
    ):
        assert found["sentiment"]["probabilities"] == pytest.approx(dict(ours.probabilities), abs=1e-5)
    pairs = [("the film was fine", "the film was not fine"), ("no", "a longer answer")]
    ours = predict_texts(loaded, pairs, ["paraphrase", "similarity"])
    for column, task in enumerate(("paraphrase", "similarity")):
        model = AutoModelForSequenceClassification.from_pretrained(written[task])
        tokenizer = AutoTokenizer.from_pretrained(written[task])
        logits = model(**tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")).logits
        for row, answers in zip(logits, ours, strict=True):
            theirs = row.softmax(0).tolist() if task == "paraphrase" else [float(row)]
            own = answers[column]
            expected = list(own.probabilities.values()) if task == "paraphrase" else [own.score]
            assert theirs == pytest.approx(expected, abs=1e-5)


def test_the_report_tells_how_many_parameters_train(finished):
    [plan] = events(finished, "plan")
    assert f"{plan['trainable']:,} of them trained" in finished.report.read_text().replace("\u202f", ",")
