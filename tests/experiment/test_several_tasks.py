"""Whole runs of clients with several tasks, under the schedules and the losses they may have."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fedmtl.experiment.run import resume_run, start_run
from fedmtl.export.hf import export_hf
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.predict.run import evaluate_validation, load_run
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.sharing.plan import Key
from raw_events import raw_events

TWO_TASKS = "clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [similarity, paraphrase]}}"
UNCERTAIN = ["training.loss_weighting=uncertainty", "training.head_rate=10"]
MIXED = [TWO_TASKS, *UNCERTAIN, "training.task_schedule=joint", "training.gradients=pcgrad"]
DRAWN = [TWO_TASKS, *UNCERTAIN, "training.task_schedule=annealed", "wire.up=int8"]

EVERYTHING = [
    *MIXED,
    "model.lora={rank: 2, mode: full_model}",
    "model.adapters={kind: pals, size: 8, heads: 2, share: projections}",
    "training.smart={bregman: 1}",
    "sharing.adaptive={}",
    "federation.task_weighting={kind: progress}",
    "wire.up=int8",
]


def digest(run: RunFolder) -> str | None:
    return summarize(read_events(run)).weights_sha256


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(MIXED, id="joint", marks=pytest.mark.slow),
        pytest.param(DRAWN, id="annealed"),
        pytest.param(EVERYTHING, id="everything", marks=pytest.mark.slow),
    ],
)
def test_the_weights_depend_neither_on_the_workers_nor_on_a_break(make_config, monkeypatch, overrides):
    whole = start_run(make_config(*overrides), "whole")
    assert digest(start_run(make_config(*overrides, "compute.workers=2"), "workers")) == digest(whole)

    class Killed(BaseException):
        pass

    def dying(*args, **kwargs):
        if args[1] == 2:
            raise Killed
        return saved(*args, **kwargs)

    from fedmtl.federation.client import save_state as saved

    with monkeypatch.context() as patch:
        patch.setattr("fedmtl.federation.client.save_state", dying)
        with pytest.raises(Killed):
            start_run(make_config(*overrides), "killed")
    assert digest(resume_run(RunFolder(whole.path.parent / "killed"))) == digest(whole)


def test_what_was_seen_is_told_per_client_round_and_run(make_config):
    # Clients a and b: 40 sentiment, 20 + 20 similarity, 40 paraphrase; batches of 8.
    # A joint epoch is as long as the longer task: five steps.
    run = start_run(make_config(TWO_TASKS, "training.task_schedule=joint", "training.gradients=pcgrad"), "seen")
    events = raw_events(run)
    updates = {(e["client"], e["round"]): e for e in events if e["event"] == "update"}
    for number in (1, 2):
        assert updates["a", number]["tasks"]["sentiment"]["seen"] == 40
        # Three batches of 20 examples, 8 + 8 + 4 in some order, and two of the next pass.
        assert updates["a", number]["tasks"]["similarity"]["seen"] in (20 + 16, 20 + 12)
        assert 0 <= updates["a", number]["conflicts"] <= 1
    rounds = {e["round"]: e for e in events if e["event"] == "round"}
    assert rounds[0]["seen"] == {}
    for number in (1, 2):
        both = [updates[client, number]["tasks"]["similarity"]["seen"] for client in ("a", "b")]
        assert rounds[number]["seen"] == {"sentiment": 40, "similarity": sum(both), "paraphrase": 40}
        assert rounds[number]["samples"] == 80 + sum(both)
    passes = summarize(read_events(run)).to_json()["passes"]
    assert passes["sentiment"] == passes["paraphrase"] == 2.0
    assert passes["similarity"] == (rounds[1]["seen"]["similarity"] + rounds[2]["seen"]["similarity"]) / 40
    assert f">{passes['similarity']:.2f}<" in run.report.read_text()


def test_steps_that_end_in_a_short_batch_are_counted_as_they_are(make_config):
    # Twenty examples in batches of 8: three batches are all of them, and no full batch more.
    run = start_run(make_config("training.local_steps=3", "training.num_rounds=1"), "short")
    assert [e["samples"] for e in raw_events(run) if e["event"] == "round"] == [0, 6 * 20]
    assert summarize(read_events(run)).tasks["sentiment"].passes == 1.0


def test_a_task_that_was_not_drawn_is_not_returned(make_config):
    # One task a round and client, all its examples once; only heads that had their turn are averaged.
    run = start_run(make_config(TWO_TASKS, "training.task_schedule=epoch", "training.num_rounds=4"), "drawn")
    events = raw_events(run)
    sizes = {"sentiment": 40, "similarity": 20, "paraphrase": 40}
    drawn: dict[int, set[str]] = {}
    for event in events:
        if event["event"] == "update":
            [(task, told)] = event["tasks"].items()
            assert told["examples"] == told["seen"] == sizes[task]
            drawn.setdefault(event["round"], set()).add(task)
    heads = {
        event["round"]: {entry["head"] for entry in event["aggregated"]} - {None}
        for event in events
        if event["event"] == "round" and event["round"]
    }
    assert heads == drawn
    assert len(set.union(*drawn.values())) > 1


def test_a_variance_is_averaged_in_its_task_counted_saved_and_left_out_of_an_export(make_config, tmp_path):
    run = start_run(make_config(*MIXED, "model.pair=cross"), "uncertain")
    plain = start_run(make_config(TWO_TASKS, "model.pair=cross"), "plain")
    totals = [summarize(read_events(each)).parameters for each in (run, plain)]
    assert totals[0] == totals[1] + 3
    names = {Key(f"task:{task}", f"heads.{task}.log_variance") for task in ("sentiment", "paraphrase", "similarity")}
    loaded = load_run(run)
    weights = loaded.saved.weights
    assert names <= weights.keys()
    assert all(weights[name].shape == (1,) and float(weights[name]) != 0 for name in names)
    last = load_checkpoint(run.checkpoints, 2)
    assert all(torch.equal(last.weights[name], weights[name]) for name in names)
    assert set(evaluate_validation(loaded)) == {"sentiment", "paraphrase", "similarity"}
    made = export_hf(loaded.saved, loaded.bound, tmp_path / "export").folders
    tensors = load_file(made["sentiment"] / "model.safetensors")
    assert not any("log_variance" in name for name in tensors)
