"""The seven invariants of the design, each by running it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmtl.config import Config
from fedmtl.config.file import dump_config, load_config
from fedmtl.engines import local
from fedmtl.errors import WireError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.aggregators.mean import combine
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import Update
from fedmtl.federation.wire import decode_job, encode_job
from fedmtl.methods.server_optimizers import server_step
from fedmtl.predict.run import evaluate_validation, load_run
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.sharing.plan import weights_sha256
from raw_events import raw_events

PERSONAL = 'sharing.rules=[{"heads.similarity.*": client}, {"heads.*": task}, {"*": all}]'
GROUPS = [
    "sharing.groups={pair: {same: [paraphrase], near: [similarity]}, single: [sentiment]}",
    'sharing.rules=[{"embeddings.LayerNorm.*": client}, {"embeddings.*": fixed}, {"heads.*": task},'
    ' {"encoder.layer.0.attention.*": group}, {"encoder.layer.0.output.*": group.2}, {"*": all}]',
]
TWO_TASKS = (
    "clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [similarity, paraphrase]}, c: {tasks: [paraphrase]}}"
)
CLIPPED = ["federation.aggregation=clipped_mean", "federation.max_share=0.4"]
# Three clients of a task, so that there is something to compare; each scope by a rule of its own.
ROBUST = [
    "federation.clients_per_task=3",
    'federation.aggregation={rule: trimmed_mean, scopes: {"task:s*": multi_krum, all: centered_clipping}}',
]
INT8 = ["wire.down=int8", "wire.up=int8"]


@pytest.fixture(autouse=True)
def _many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "a run in this process gives the threads back"
    torch.set_num_threads(before)


def digest(run: RunFolder) -> str:
    sha = summarize(read_events(run), run.name).weights_sha256
    assert sha is not None
    return sha


# 1. Same config, same seed, same accepted contributions: same weights on every engine.


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*GROUPS, TWO_TASKS, "federation.server_optimizer.kind=fedadam"],
        pytest.param(
            ["model.pair=cross", "model.pool=mean", "training.keep_optimizer=true", "training.proximal=0.1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["training.logit_adjustment=1", "federation.average=tasks", "partition={kind: dirichlet, alpha: 0.5}"],
            marks=pytest.mark.slow,
        ),
        INT8,
        pytest.param(
            [*GROUPS, TWO_TASKS, "wire.down=fp16", "wire.up=topk", "wire.topk_share=0.1"], marks=pytest.mark.slow
        ),
        [*GROUPS, TWO_TASKS, *CLIPPED],
        ROBUST,
    ],
    ids=["plain", "groups", "kept", "skewed", "int8", "topk", "clipped", "robust"],
)
def test_1_any_number_of_workers_gives_the_same_weights(make_config, overrides):
    numbers = (0, 2) if overrides else (0, 1, 2)
    runs = [start_run(make_config(*overrides, f"compute.workers={workers}"), "parity") for workers in numbers]
    assert len({digest(run) for run in runs}) == 1


def test_1_what_crosses_is_what_would_cross_a_network(make_config, run_once):
    run = run_once()
    updates = [event for event in raw_events(run) if event["event"] == "update"]
    prepared = prepare(make_config())
    info = prepared.clients[updates[0]["client"]]
    job = Dispatch(prepared.server).job(
        "train", prepared.state, updates[0]["client"], tuple(updates[0]["tasks"]), info.rows, 1, {}
    )
    tensors = sum(tensor.numel() * 4 for tensor in job.weights.values())
    # the tensors of the slice, a byte or so for each of its rows, and a header of a kilobyte
    assert tensors < updates[0]["bytes_down"] < tensors + 2 * len(job.rows) + 1500
    assert tensors < updates[0]["bytes_up"] < tensors + 2 * len(job.rows) + 1500


@pytest.mark.parametrize(("codec", "share"), [("fp16", 0.5), ("int8", 0.25), ("topk", 0.04)])
def test_1_lossy_codecs_save_what_they_promise_and_are_counted(run_once, codec, share):
    sizes = []
    down = "int8" if codec == "topk" else codec
    for settings in ([], [f"wire.up={codec}", f"wire.down={down}"]):
        events = raw_events(run_once(*settings))
        sizes.append([e["bytes_up"] for e in events if e["event"] == "update"])
    # vectors stay exact, and a model 32 wide has many of them
    for exact, lossy in zip(*sizes, strict=True):
        assert share < lossy / exact < share + 0.13


def test_1_a_slice_over_the_limit_is_one_clear_error(make_config):
    with pytest.raises(WireError, match=r"bytes is over wire.max_bytes, 20000"):
        start_run(make_config("wire.max_bytes=20000"), "large")


@pytest.mark.parametrize("pool", ["auto", "cls", "mean"])
def test_1_the_encoders_own_module_gives_the_same_weights_up_to_rounding(make_config, pool):
    calm = ["model.encoder_dropout=0", "model.head_dropout=0", f"model.pool={pool}", "model.pair=cross"]
    ours, plain = (start_run(make_config(*calm, f"compute.encoder={kind}"), kind) for kind in ("auto", "plain"))
    a, b = (load_checkpoint(run.checkpoints) for run in (ours, plain))
    assert a is not None
    assert b is not None
    moved = prepare(make_config(*calm)).state.weights
    assert max(float((a.weights[key] - moved[key]).abs().max()) for key in moved) > 1e-3
    for key in a.weights:
        # A key's bias has no gradient but rounding, which AdamW blows up.
        if not key.name.endswith("key.bias"):
            torch.testing.assert_close(a.weights[key], b.weights[key], atol=2e-5, rtol=1e-4)


# 2. Kill it anywhere, resume, and get the same weights.


@pytest.mark.parametrize(
    ("where", "wire"),
    [
        *((place, []) for place in ("update", "round", "checkpoint", "client_state")),
        pytest.param("client_state", INT8, marks=pytest.mark.slow),
        pytest.param("update", [*INT8, "wire.up=topk"], marks=pytest.mark.slow),
        pytest.param("round", CLIPPED, marks=pytest.mark.slow),
        pytest.param("update", ROBUST, marks=pytest.mark.slow),
    ],
    ids=[
        "update",
        "round",
        "checkpoint",
        "client_state",
        "client_state_int8",
        "update_topk",
        "round_clipped",
        "update_robust",
    ],
)
def test_2_killed_at_any_point_it_resumes_to_the_same_weights(make_config, run_once, monkeypatch, where, wire):
    overrides = [PERSONAL, "training.num_rounds=3", "training.keep_optimizer=true", "tasks.sentiment.patience=1"]
    overrides += wire
    config, whole = make_config(*overrides), run_once(*overrides)

    class Killed(BaseException):
        pass

    countdown = iter(range(100))

    def dying(original, at):
        def call(*args, **kwargs):
            if next(countdown) == at:
                raise Killed
            return original(*args, **kwargs)

        return call

    places = {
        "update": ("fedmtl.engines.local.encode_update", 9),
        "round": ("fedmtl.experiment.run.append_results", 2),
        "checkpoint": ("fedmtl.federation.checkpoint.write_atomic", 2),
        "client_state": ("fedmtl.federation.client.save_state", 10),
    }
    name, at = places[where]
    module, attribute = name.rsplit(".", 1)
    with monkeypatch.context() as patch:
        patch.setattr(name, dying(getattr(sys.modules[module], attribute), at))
        with pytest.raises(Killed):
            start_run(config, "killed")
    killed = RunFolder(Path(config.output) / "killed")
    assert not any(event["event"] == "end" for event in raw_events(killed))
    resumed = resume_run(killed)
    assert digest(resumed) == digest(whole)
    assert _scores(resumed) == _scores(whole)
    assert _columns(resumed) == _columns(whole)


@pytest.mark.slow
def test_2_a_process_killed_at_random_moments_resumes_to_the_same_weights(make_config, tmp_path):
    config = make_config("training.num_rounds=4", "compute.workers=2", "training.keep_optimizer=true")
    whole = start_run(config, "whole")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "fedmtl", "run"]
    process = subprocess.Popen([*command, str(path), "--name", "killed"], stdout=subprocess.DEVNULL)
    killed = RunFolder(Path(config.output) / "killed")
    for wanted in (1, 2, 3):
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if killed.results.exists() and killed.results.read_text().count("\n") > wanted + 1:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resume = ["-c", f"import os; os.chdir({str(tmp_path)!r}); from fedmtl.cli import main; main()"]
        process = subprocess.Popen(
            [sys.executable, *resume, "run", "--resume", str(killed.path)], stdout=subprocess.DEVNULL
        )
    assert process.wait(120) == 0
    assert digest(killed) == digest(whole)


# 3 is worked by hand in tests/federation/test_combine.py and test_server.py.


# 4. One bad client costs its own contribution and nothing else, and the report names it.


@pytest.mark.parametrize(
    ("fault", "reason", "wire"),
    [
        ("garbage", "not a fedmtl frame", []),
        ("nan", "not numbers", []),
        ("raises", "ValueError: broken", []),
        ("old", "is for round", []),
        ("old", "is for round", INT8),
        ("another", "answered as a", []),
    ],
)
def test_4_one_bad_client_costs_its_own_contribution_and_nothing_else(
    make_config, run_once, monkeypatch, tmp_path, fault, reason, wire
):
    calm = run_once("clients={a: {tasks: [sentiment, paraphrase]}, b: {tasks: [similarity]}}", *wire)
    original = local.encode_update

    def spoiled(update, **options):
        if update.client != "bad":
            return original(update, **options)
        if fault == "garbage":
            return np.frombuffer(b"garbage" * 100, dtype=np.uint8)
        if fault == "raises":
            raise ValueError("broken")
        if fault == "another":
            return original(replace(update, client="a"))
        if fault == "old":
            return original(replace(update, round=update.round - 1))
        return original(replace(update, delta={k: v * float("nan") for k, v in update.delta.items()}))

    monkeypatch.setattr(local, "encode_update", spoiled)
    empty = tmp_path / "bad.tsv"
    empty.write_text("sentence\tlabel\n" + "a fine film\tpositive\na dull film\tnegative\n" * 10)
    mixed = start_run(
        make_config(
            "clients={a: {tasks: [sentiment, paraphrase]}, b: {tasks: [similarity]},"
            f" bad: {{tasks: [sentiment], source: {{sentiment: {empty}}}}}}}",
            *wire,
        ),
        "mixed",
    )
    assert digest(mixed) == digest(calm)
    failures = summarize(read_events(mixed), "mixed").failures
    assert [(failure.round, failure.client) for failure in failures] == [(1, "bad"), (2, "bad")]
    assert all(reason in failure.reason for failure in failures)
    assert "bad" in mixed.report.read_text()
    assert reason in mixed.report.read_text()


# 5. Cutting then merging with no training is the identity, by level and by vocabulary.


@pytest.mark.parametrize(
    "overrides",
    [[], GROUPS, ["federation.vocabulary_slices=false"], INT8],
    ids=["plain", "groups", "whole", "int8"],
)
def test_5_cutting_then_merging_without_training_is_the_identity(make_config, overrides):
    prepared = prepare(make_config(*overrides, TWO_TASKS))
    dispatch = Dispatch(prepared.server)
    updates = []
    for client, info in prepared.clients.items():
        tasks = prepared.server.active_tasks(client, 1)
        job = dispatch.job("train", prepared.state, client, tasks, info.rows, 1, {})
        received = decode_job(encode_job(job)).weights
        delta = {key: value - received[key] for key, value in received.items() if key.scope != "fixed"}
        updates.append(Update(1, client, tasks, delta, job.rows, dict.fromkeys(tasks, 3), {}))
    mean = combine(updates, prepared.state.weights, prepared.state.plan, prepared.server.task_weights)
    moved = {key for key in prepared.state.weights if key.scope != "fixed"}
    assert set(mean) == moved
    merged, _ = server_step(prepared.config.federation.server_optimizer, prepared.state.weights, mean, {})
    assert weights_sha256(merged) == weights_sha256(prepared.state.weights)


def test_5_vocabulary_slices_change_no_average(make_config):
    settings = ["model.encoder_dropout=0", "model.head_dropout=0", "training.weight_decay=0.1"]
    sliced = start_run(make_config(*settings), "sliced")
    whole = start_run(make_config(*settings, "federation.vocabulary_slices=false"), "whole")
    a, b = (load_checkpoint(run.checkpoints) for run in (sliced, whole))
    assert a is not None
    assert b is not None
    for key in a.weights:
        torch.testing.assert_close(a.weights[key], b.weights[key], atol=1e-6, rtol=1e-5)
    sent = [sum(e["bytes_up"] for e in raw_events(run) if e["event"] == "round") for run in (sliced, whole)]
    assert sent[0] < sent[1]


# 6. The resolved config alone reproduces the run.


def test_6_the_resolved_config_alone_reproduces_the_run(make_config):
    first = start_run(make_config("partition.kind=dirichlet", "partition.alpha=5", "seed=3"), "first")
    again: Config = load_config(first.config)
    assert dump_config(again) == first.config.read_text()
    assert digest(start_run(again, "again")) == digest(first)


def test_6_another_seed_gives_another_run(run_once):
    assert digest(run_once("seed=1")) != digest(run_once())


# 7. Every number in a report can be recomputed from the run folder.


def test_7_the_scores_can_be_recomputed_from_the_folder(run_once, one_thread):
    # After two rounds the scores differ by 5e-5 between texts, and single precision rounds them to 1e-7: to five digits
    # Pearson's r is the same only in the same arithmetic, that of one thread.
    run = run_once()
    events = raw_events(run)
    final = {event["task"]: event for event in events if event["event"] == "evaluation" and event["round"] == 2}
    for task, scores in evaluate_validation(load_run(run)).items():
        for metric, value in final[task]["metrics"].items():
            assert scores.metrics[metric] == pytest.approx(value, abs=1e-5), (task, metric)
    confusion = np.array(final["sentiment"]["confusion"])
    assert final["sentiment"]["metrics"]["accuracy"] == pytest.approx(np.trace(confusion) / confusion.sum())
    moments = final["similarity"]["moments"]
    pearson = moments["spread_both"] / np.sqrt(moments["spread_prediction"] * moments["spread_score"])
    assert final["similarity"]["metrics"]["pearson"] == pytest.approx(pearson)
    assert final["similarity"]["metrics"]["mse"] == pytest.approx(moments["squared_error"] / moments["count"])
    state = load_checkpoint(run.checkpoints)
    assert state is not None
    assert weights_sha256(state.weights) == digest(run)


def test_7_rounds_add_up_to_their_parts(run_once):
    events = raw_events(run_once())
    for number in (1, 2):
        own = [event for event in events if event.get("round") == number]
        updates = [event for event in own if event["event"] == "update"]
        [total] = [event for event in own if event["event"] == "round"]
        for name in ("bytes_up", "bytes_down"):
            assert total[name] == sum(update[name] for update in updates)
        losses = [update["tasks"]["sentiment"] for update in updates if "sentiment" in update["tasks"]]
        mean = sum(loss["loss"] * loss["examples"] for loss in losses) / sum(loss["examples"] for loss in losses)
        assert total["losses"]["sentiment"] == pytest.approx(mean)
        scored = {event["task"]: event["metrics"] for event in own if event["event"] == "evaluation"}
        main = [scored["sentiment"]["accuracy"], scored["paraphrase"]["accuracy"], scored["similarity"]["pearson"]]
        assert total["overall"] == pytest.approx(sum(main) / 3)


def _scores(run: RunFolder) -> list[tuple[int, str, str]]:
    return [
        (event["round"], event["task"], json.dumps(event["metrics"]))
        for event in raw_events(run)
        if event["event"] == "evaluation"
    ]


def _columns(run: RunFolder) -> list[str]:
    return [line.split(",")[0] for line in run.results.read_text().splitlines()]
