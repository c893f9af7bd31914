"""Runs whose server changes task weights and the sharing plan by itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fedmtl.config.file import load_config
from fedmtl.experiment import run as run_module
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.predict.run import evaluate_validation, load_run, predict_texts
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.sharing.plan import weights_sha256
from fedmtl.tasks.embedded import embedded_columns
from raw_events import raw_events

DEEP = "model.server_model=random-2x32"
# Below .98 tasks disagree: something splits in every round.
RESTLESS = "sharing.adaptive={split_below: 0.98, merge_above: 0.99, patience: 1, warmup_rounds: 0, smoothing: 0.3}"
PROGRESS = "federation.task_weighting={kind: progress}"
BOTH = [DEEP, RESTLESS, PROGRESS, "federation.server_optimizer.kind=fedadam"]
TWO_TASKS = (
    "clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [similarity, paraphrase]}, c: {tasks: [paraphrase]}}"
)


def digest(run: RunFolder) -> str:
    sha = summarize(read_events(run), run.name).weights_sha256
    assert sha is not None
    return sha


def decisions(run: RunFolder, layer: str) -> list[dict]:
    events = [event for event in raw_events(run) if event["event"] == "sharing"]
    return [own for event in events for own in event["layers"] if own["layer"] == layer]


def two_names(folder: Path, is_opposed: bool) -> list[str]:
    """One task under two names: other examples of it, or the same texts with scores turned round."""
    sources = []
    for split, num in (("train", 120), ("validation", 24)):
        columns = embedded_columns("similarity", split)
        rows = list(zip(*columns.values(), strict=True))
        second = [(*row[:-1], str(5 - float(row[-1]))) for row in rows[:num]] if is_opposed else rows[num : 2 * num]
        for name, own in (("a", rows[:num]), ("b", second)):
            with (folder / f"{name}_{split}.tsv").open("w", newline="") as file:
                csv.writer(file, delimiter="\t").writerows([tuple(columns), *own])
            sources.append((name, split, folder / f"{name}_{split}.tsv"))
    settings = []
    for name in ("a", "b"):
        files = {split: str(path) for owner, split, path in sources if owner == name}
        task = {"kind": "regression", "text": ["sentence1", "sentence2"], "label": "label", "score_range": [0, 5]}
        settings.append(f"tasks.{name}={json.dumps({**task, 'source': files})}")
    return settings


def run_two(folder: Path, is_opposed: bool, num_rounds: int) -> RunFolder:
    config = load_config(
        None,
        [
            *two_names(folder, is_opposed), f"output={folder / 'runs'}", "sharing.adaptive={}", "model.pair=dual",
            f"training.num_rounds={num_rounds}", "training.batch_size=8", "training.learning_rate=1e-4",
            # A head that learns fast turns its sign, and the tasks are in conflict no more.
            "training.head_rate=0.1", "compute.workers=0", "compute.device=cpu",
        ],
    )  # fmt: skip
    return start_run(config, "two")


@pytest.fixture(scope="module")
def opposed(tmp_path_factory) -> RunFolder:
    return run_two(tmp_path_factory.mktemp("opposed"), True, 5)


def test_a_task_under_two_names_keeps_all_layers_shared(tmp_path):
    run = run_two(tmp_path, False, 5)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        assert {own["after"] for own in decisions(run, layer)} == {"all"}
        assert len(decisions(run, layer)) == 5


def test_opposed_tasks_split_the_top_layer_within_five_rounds(opposed):
    moved = [own for own in decisions(opposed, "encoder.layer.1") if own["before"] != own["after"]]
    assert [(own["before"], own["after"]) for own in moved] == [("all", "task")]
    assert moved[0]["agreement"]["a/b"] < -0.1
    plans = [event for event in raw_events(opposed) if event["event"] == "plan"]
    assert plans[1]["rules"][0] == ["encoder.layer.1.*", "task"]
    assert plans[1]["total"] > plans[0]["total"]


def test_what_is_saved_and_scored_is_the_plan_of_the_end(opposed):
    loaded = load_run(opposed)
    assert loaded.saved.plan.level("encoder.layer.1.output.dense.weight") == "task"
    events = [event for event in raw_events(opposed) if event["event"] == "evaluation" and event["round"] == 5]
    again = evaluate_validation(loaded)
    for event in events:
        assert again[event["task"]].metrics["pearson"] == pytest.approx(event["metrics"]["pearson"], abs=1e-4)
    one, other = predict_texts(loaded, [("a dog runs", "a cat sleeps")], ["a", "b"])[0]
    assert one.score != other.score


def test_any_number_of_workers_gives_the_same_weights(make_config):
    kept = [TWO_TASKS, "wire.up=topk", "training.keep_optimizer=true"]
    runs = [start_run(make_config(*BOTH, *kept, f"compute.workers={workers}"), "parity") for workers in (0, 2)]
    assert len({digest(run) for run in runs}) == 1
    assert decisions(runs[0], "encoder.layer.1")[-1]["after"] == "task"
    told = [[e for e in raw_events(run) if e["event"] in ("sharing", "task_weights")] for run in runs]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(["training.num_rounds=3"], id="alone", marks=pytest.mark.slow),
        pytest.param([TWO_TASKS, "wire.up=int8", "training.keep_optimizer=true", "training.num_rounds=4"], id="kept"),
        pytest.param(
            ["training.num_rounds=4", "federation.aggregation={rule: clipped_mean, scopes: {all: centered_clipping}}"],
            id="robust",
        ),
    ],
)
def test_a_resumed_run_comes_to_the_same_weights_and_decisions(make_config, monkeypatch, extra):
    settings = [*BOTH, *extra]
    whole = start_run(make_config(*settings), "whole")
    whole_plans = [event for event in raw_events(whole) if event["event"] == "plan"]
    assert len(whole_plans) > 1

    class Killed(BaseException):
        pass

    save = run_module.save_checkpoint

    def dying(folder, state, **keys):
        save(folder, state, **keys)
        if state.round == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "save_checkpoint", dying)
        with pytest.raises(Killed):
            start_run(make_config(*settings), "killed")
    resumed = resume_run(RunFolder(whole.path.parent / "killed"))
    assert digest(resumed) == digest(whole)
    kinds = ("sharing", "task_weights", "plan")
    assert [e for e in raw_events(resumed) if e["event"] in kinds] == [
        e for e in raw_events(whole) if e["event"] in kinds
    ]


def test_clients_with_several_tasks_give_evidence_too(make_config):
    run = start_run(make_config(DEEP, RESTLESS, TWO_TASKS), "told")
    first = decisions(run, "encoder.layer.0")[0]["measured"]
    # a tells of sentiment and similarity, b of similarity and paraphrase; nobody of sentiment and paraphrase
    assert set(first) == {"sentiment/similarity", "paraphrase/similarity"}
    assert all(-1.0 <= value <= 1.0 for value in first.values())


def test_nothing_moves_and_nothing_is_told_by_default(make_config):
    run = start_run(make_config(), "still")
    assert not {event["event"] for event in raw_events(run)} & {"sharing", "task_weights"}
    state = load_checkpoint(run.checkpoints)
    assert state is not None
    assert state.extra == {}
    assert weights_sha256(state.weights) == digest(run)
