from dataclasses import replace

import pytest
import torch

from federation.fake_engine import ENCODER, NAMES, PLAN, FakeEngine, head, make_server, scores, start
from fedmtl.errors import FedmtlError
from fedmtl.experiment import run as run_module
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.messages import State
from fedmtl.federation.server import rounds
from fedmtl.methods.early_stopping import NAME, EarlyStopping
from fedmtl.model.tensor_files import load_tensors
from fedmtl.runs.event_lines import events_of, to_json
from fedmtl.runs.events import EarlyStopEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.sharing.plan import Extra, Key, SharingPlan, weights_sha256

BY_ROUND = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.6}
LAYER = {task: Key(f"task:{task}", "top") for task in ("sst2", "stsb")}


def scored(by_round):
    return lambda state: scores(sst2=by_round[state.round], stsb=0.5)


def layered():
    """The state and the server of a federation whose tasks have a layer each beside their heads."""
    plan = SharingPlan((("top", "task"), *PLAN.rules))
    weights = {**start().weights, **{key: torch.zeros(1) for key in LAYER.values()}}
    return State(0, weights, plan), replace(make_server(patience=1), names=(*NAMES, "top"))


def scope_digests(state):
    scopes = {key.scope for key in state.weights}
    return {scope: weights_sha256({k: v for k, v in state.weights.items() if k.scope == scope}) for scope in scopes}


def test_early_stopping_fixes_the_head_at_its_best_round_and_the_encoder_goes_on():
    engine = FakeEngine()
    done = list(rounds(start(), make_server(patience=1), engine, scored(BY_ROUND)))
    event = {"event": "early_stop", "round": 2, "task": "sst2", "best_round": 1, "score": 0.9, "stop_score": 0.5}
    assert [tuple(map(to_json, each.events)) for each in done] == [(), (), (event,), ()]
    last = done[-1].state
    # best in round 1, when the head was 1; it was 2 when the task was stopped
    assert last.weights[head("sst2")].item() == 1.0
    assert last.weights[ENCODER].item() == 3.0
    third = next(job for job in engine.jobs if job.round == 3 and job.client == "a")
    assert third.weights[head("sst2")].item() == 1.0
    assert last.progress["sst2"].best_round == 1


def test_after_a_stop_no_value_of_the_tasks_scope_moves():
    state, server = layered()
    done = list(rounds(state, server, FakeEngine(), scored(BY_ROUND)))
    stopped, last = done[2].state, done[3].state
    assert stopped.plan.stopped == ("sst2",)
    before, after = scope_digests(stopped), scope_digests(last)
    assert {scope for scope in before if before[scope] == after[scope]} == {"task:sst2"}
    # as they were in the best round, round 1
    assert {last.weights[key].item() for key in (LAYER["sst2"], head("sst2"))} == {1.0}
    assert {last.weights[key].item() for key in (LAYER["stsb"], head("stsb"), ENCODER)} == {3.0}


def test_an_update_that_moves_a_value_of_a_stopped_task_is_refused():
    def stubborn(job):
        update = FakeEngine().answer(replace(job, plan=replace(job.plan, stopped=())))
        return update if job.client == "a" else FakeEngine().answer(job)

    state, server = layered()
    done = list(rounds(state, server, FakeEngine(stubborn), scored(BY_ROUND)))
    assert [[failure.client for failure in each.failures] for each in done] == [[], [], [], ["a"]]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_rounds_before_the_first_that_counts_are_no_best_round(first):
    """Round 0 and warm-up score best here: with them the task would stop at once, its head as it was in round 0."""
    server = make_server(patience=1)
    tasks = server.tasks
    server = replace(server, methods=[EarlyStopping(tasks, {"sst2": first, "stsb": 1})])
    server = replace(server, settings=replace(server.settings, num_rounds=6))
    falling = {number: 0.9 - 0.1 * number for number in range(7)}
    done = list(rounds(start(), server, FakeEngine(), scored(falling)))
    stops = [event for each in done for event in each.events]
    assert [(event.round, event.best_round) for event in stops] == [(first + 1, first)]
    assert done[-1].state.weights[head("sst2")].item() == float(first)


@pytest.mark.parametrize(
    ("overrides", "first"),
    [([], 1), (["training.warmup_rounds=0.25"], 1), (["training.warmup_rounds=2"], 3), (["from_round=3"], 3)],
)
def test_what_counts_begins_after_warm_up_and_with_the_tasks_training(make_config, overrides, first):
    given = ["training.num_rounds=4", "tasks.sentiment.patience=1"]
    given += [f"tasks.sentiment.{text}" if text.startswith("from_round") else text for text in overrides]
    methods = prepare(make_config(*given)).server.methods
    found = next(method for method in methods if isinstance(method, EarlyStopping))
    assert found.first_rounds["sentiment"] == first


def test_an_undefined_score_is_not_better_and_uses_up_patience():
    server = make_server(patience=2)
    by_round = {0: None, 1: 0.4, 2: None, 3: None}
    done = list(rounds(start(), server, FakeEngine(), scored(by_round)))
    assert [event.task for event in done[-1].events] == ["sst2"]
    assert done[-1].state.progress["sst2"].best_round == 1


def test_what_methods_know_of_a_stopped_task_is_dropped():
    tensors = {"slot": {key: torch.ones(1) for key in (ENCODER, head("sst2"), head("stsb"))}}
    state = replace(start(), extra={"other": Extra({"kept": 1}, tensors)})
    server = make_server(patience=1, server_optimizer={"kind": "fedavgm"})
    done = list(rounds(state, server, FakeEngine(), scored(BY_ROUND)))
    assert set(done[1].state.extra["server_optimizer"].slot("momentum")) == {ENCODER, head("sst2"), head("stsb")}
    assert set(done[1].state.extra[NAME].slot("sst2")) == {head("sst2")}
    last = done[-1].state.extra
    assert set(last["server_optimizer"].slot("momentum")) == {ENCODER, head("stsb")}
    assert set(last["other"].slot("slot")) == {ENCODER, head("stsb")}
    assert last["other"].values == {"kept": 1}
    assert NAME not in last


@pytest.mark.parametrize(
    "extra",
    [
        Extra({"sst2": 1}),
        Extra(tensors={"other": {head("sst2"): torch.ones(1)}}),
        Extra(tensors={"stsb": {head("stsb"): torch.ones(1)}}),
    ],
)
def test_a_state_that_it_did_not_write_is_refused(extra):
    tasks = make_server(patience=1).tasks
    method = EarlyStopping(tasks, {"sst2": 1, "stsb": 1})
    method.check(Extra(tensors={"sst2": {head("sst2"): torch.ones(1)}}))
    with pytest.raises(ValueError, match="early stopping"):
        method.check(extra)


LAYERS = 'sharing.rules=[{"heads.*": task}, {"encoder.layer.0.output.*": task}, {"*": all}]'
STOPPED = (LAYERS, "tasks.sentiment.patience=1", "training.num_rounds=4", "checkpoint.every=1")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["compute.stack=2"],
        ["federation.server_optimizer.kind=fedadam", "training.keep_optimizer=true", "wire.up=int8"],
        ["clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [paraphrase]}}", "training.task_schedule=joint"],
        ["methods.scaffold={}"],
        ["training.pruning={amount: 0.5, rounds: 3}"],
        ["mode=federated_single_task"],
        [
            LAYERS.replace("0.output.*", "*"),
            "sharing.adaptive={levels: [all, task], patience: 3, warmup_rounds: 0, merge_above: -.9, split_below: -1}",
        ],
    ],
    ids=["plain", "stacked", "optimizers", "two_tasks", "scaffold", "pruning", "single_task", "adaptive"],
)
def test_a_stopped_tasks_values_stay_to_the_last_bit_in_a_run(make_config, monkeypatch, overrides):
    falling = _falling(monkeypatch)
    run = start_run(make_config(*STOPPED, *overrides), "stopped")
    assert falling, "the scores were made up"
    stop = events_of(read_events(run), EarlyStopEvent)
    assert [(event.round, event.best_round) for event in stop] == [(2, 1)]
    states = [load_checkpoint(run.checkpoints, number) for number in (1, 2, 3, 4)]
    digests = [scope_digests(state) for state in states]
    assert len({found["task:sentiment"] for found in digests[1:]}) == 1
    for scope in {"task:similarity", "task:paraphrase"}:
        assert len({found[scope] for found in digests}) == 4
    if not overrides:
        assert digests[0]["task:sentiment"] == digests[1]["task:sentiment"]


@pytest.mark.slow
def test_a_run_with_a_stop_resumes_to_the_same_bits(make_config, monkeypatch):
    """It breaks off before the stop, when the best values are in the state, and once more just after it."""
    _falling(monkeypatch)
    config = make_config(*STOPPED, "federation.server_optimizer.kind=fedadam", "training.keep_optimizer=true")
    whole = start_run(config, "whole")
    real, broken = run_module.save_checkpoint, RunFolder(whole.path.parent / "broken")
    for after, go_on in ((1, lambda: start_run(config, "broken")), (2, lambda: resume_run(broken))):

        def save(folder, state, after=after, **rest):
            if state.round > after:
                raise FedmtlError("broken off")
            real(folder, state, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(run_module, "save_checkpoint", save)
            with pytest.raises(FedmtlError, match="broken off"):
                go_on()
    resume_run(broken)
    for number in range(1, 5):
        first, second = (load_checkpoint(run.checkpoints, number) for run in (whole, broken))
        assert scope_digests(first) == scope_digests(second)
        assert (first.plan, first.progress, first.extra.keys()) == (second.plan, second.progress, second.extra.keys())


@pytest.mark.slow
def test_adapters_stop_with_their_task_and_a_personal_head_where_it_is(make_config, monkeypatch):
    _falling(monkeypatch)
    adapted = start_run(make_config(*STOPPED[1:], "model.adapters={kind: low_rank, size: 4}"), "adapted")
    found = [load_checkpoint(adapted.checkpoints, number).weights for number in (2, 4)]
    names = {key.name for key in found[0] if key.scope == "task:sentiment"}
    assert {name.split(".")[0] for name in names} == {"adapters", "heads"}
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0] if key.name in names)
    rules = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
    personal = start_run(make_config(rules, *STOPPED[1:], "training.learning_rate=3e-2"), "personal")
    events = read_events(personal)
    stops = [event.round for event in events_of(events, EarlyStopEvent)]
    assert stops, "the scores of sentiment fall at this rate"
    assert stops[0] < 4
    last, before = (load_tensors(personal.clients / "sentiment_client_1" / f"round-000{n}.safetensors") for n in (4, 3))
    heads = [key for key in last["values"] if key.name.startswith("heads.sentiment")]
    assert heads
    assert all(torch.equal(last["values"][key], before["values"][key]) for key in heads)


def _falling(monkeypatch):
    """The scores of sentiment fall after round 1, whatever the model answers."""
    real, seen = run_module.evaluate_at_server, []

    def evaluate(state, *rest):
        found = real(state, *rest)
        seen.append(state.round)
        value = replace(found.scores["sentiment"], metrics={"accuracy": 0.9 - 0.1 * abs(state.round - 1)})
        return replace(found, scores={**found.scores, "sentiment": value})

    monkeypatch.setattr(run_module, "evaluate_at_server", evaluate)
    return seen
