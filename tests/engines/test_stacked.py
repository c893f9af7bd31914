"""Clients that train at once against the same clients one by one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedmtl.engines.local import LocalEngine
from fedmtl.engines.stacked import StackedEngine
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation import client_stack
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import Failure, Job, Update
from fedmtl.runs.folder import RunFolder, create_run
from fedmtl.training.local import TrainingFailed
from raw_events import raw_events

# A random encoder's cosine hardly moves: a small epsilon would make steps of rounding.
ALIKE = ("model.encoder_dropout=0", "model.head_dropout=0", "training.max_grad_norm=0.5", "training.epsilon=1e-3")


def answers(config, folder, *, round_number=1) -> dict[str, Update | Failure]:
    prepared = prepare(config)
    engine = open_engine(prepared, create_run(folder, "run"))
    assert isinstance(engine, StackedEngine if config.compute.stack else LocalEngine)
    try:
        return {answer.client: answer for answer in engine.run(jobs(prepared, round_number), 60)}
    finally:
        engine.close()


def jobs(prepared, round_number: int) -> Iterator[Job]:
    dispatch, settings = Dispatch(prepared.server), prepared.server.settings.to_dict()
    for client, info in prepared.clients.items():
        tasks = prepared.server.active_tasks(client, round_number)
        yield dispatch.job("train", prepared.state, client, tasks, info.rows, round_number, settings)


def furthest(first: Update | Failure, second: Update | Failure) -> float:
    assert isinstance(first, Update)
    assert isinstance(second, Update)
    assert first.delta.keys() == second.delta.keys()
    return max(float((first.delta[key] - second.delta[key]).abs().max()) for key in first.delta)


@pytest.mark.parametrize("stack", [1, 4, 6])
def test_a_round_is_the_same_however_many_train_at_once(stack, make_config, tmp_path):
    alone = answers(make_config(*ALIKE), tmp_path / "alone")
    at_once = answers(make_config(*ALIKE, f"compute.stack={stack}"), tmp_path / "stacked")
    assert alone.keys() == at_once.keys()
    assert len(alone) == 6
    for client, update in alone.items():
        assert furthest(update, at_once[client]) < 1e-5
        assert update.losses == pytest.approx(at_once[client].losses, rel=1e-4)
        assert update.num_examples == at_once[client].num_examples
        assert update.seen == at_once[client].seen == {client.partition("_")[0]: 20}
        assert update.traffic.bytes_down == at_once[client].traffic.bytes_down
        assert abs(update.traffic.bytes_up - at_once[client].traffic.bytes_up) < 64


def test_clients_that_train_at_once_are_compared_like_any_others(make_config):
    rules = 'federation.aggregation={rule: multi_krum, scopes: {"task:*": coordinate_median}}'
    given = [*ALIKE, rules, "federation.clients_per_task=3", "training.num_rounds=1"]
    runs = [start_run(make_config(*given, f"compute.stack={stack}"), f"stack-{stack}") for stack in (0, 9)]
    one, other = (load_file(run.path / "model" / "weights.safetensors") for run in runs)
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.parametrize("setting", ["smart", "distillation"])
def test_clients_with_an_objective_that_a_stack_does_not_know_train_alone(setting, make_config, tmp_path):
    teacher = start_run(make_config("training.num_rounds=0"), "teacher").path if setting == "distillation" else None
    told = {"smart": "training.smart={weight: 1}", "distillation": f"training.distillation={{teacher: {teacher}}}"}
    alone = answers(make_config(*ALIKE, told[setting]), tmp_path / "alone")
    at_once = answers(make_config(*ALIKE, told[setting], "compute.stack=4"), tmp_path / "stacked")
    assert [furthest(update, at_once[client]) for client, update in alone.items()] == [0.0] * 6


def test_what_a_client_keeps_to_itself_is_kept(make_config, tmp_path):
    plan = "sharing.rules=[{heads.*: task}, {embeddings.*: client}, {'*': all}]"
    alone = answers(make_config(*ALIKE, plan), tmp_path / "alone")
    at_once = answers(make_config(*ALIKE, plan, "compute.stack=6"), tmp_path / "stacked")
    for client, update in alone.items():
        assert not any(key.scope.startswith("client:") for key in at_once[client].delta)
        assert furthest(update, at_once[client]) < 1e-5
    stored = sorted(
        path.relative_to(tmp_path / "stacked") for path in (tmp_path / "stacked").rglob("round-*.safetensors")
    )
    assert len(stored) == 6


def test_tasks_that_share_layers_at_different_levels_still_train_at_once(make_config, tmp_path):
    plan = [
        "sharing.groups={pair: [paraphrase, similarity]}",
        "sharing.rules=[{heads.*: task}, {'encoder.layer.0.*': group}, {'*': all}]",
        "sharing.adaptive={}",
    ]
    config = make_config(*ALIKE, *plan, "compute.stack=6")
    alone = answers(make_config(*ALIKE, *plan), tmp_path / "alone")
    at_once = answers(config, tmp_path / "stacked")
    scopes = {key.scope for update in at_once.values() for key in update.delta if key.name.startswith("encoder.")}
    assert scopes == {"group:pair", "task:sentiment"}
    for client, update in alone.items():
        assert furthest(update, at_once[client]) < 1e-5


def test_a_loss_weight_that_changes_needs_no_new_stack(make_config, tmp_path):
    prepared = prepare(make_config(*ALIKE, "compute.stack=6", "training.task_weight_in=loss"))
    engine = open_engine(prepared, create_run(tmp_path, "run"))
    assert isinstance(engine, StackedEngine)
    moved, made = [], []
    try:
        # Twice the same: the first round's tokens arrive while stacks are made.
        for weight in (1.0, 1.0, 0.01):
            told = dict.fromkeys(prepared.tasks, weight)
            asked = [replace(job, settings={**job.settings, "loss_weights": told}) for job in jobs(prepared, 1)]
            moved.append({answer.client: answer for answer in engine.run(iter(asked), 60)})
            made.append(set(engine._stacks.made))
    finally:
        engine.close()
    assert made[2] == made[1]
    # A smaller loss is a smaller gradient, which an epsilon this large lets AdamW tell.
    assert all(furthest(update, moved[2][client]) > 1e-6 for client, update in moved[1].items())


BOTH = "clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [sentiment]}, c: {tasks: [paraphrase]}}"


def test_a_client_with_two_tasks_is_a_stack_by_itself(make_config, tmp_path, monkeypatch):
    alone = answers(make_config(*ALIKE, BOTH), tmp_path / "alone")
    groups = watch_stacks(monkeypatch)
    at_once = answers(make_config(*ALIKE, BOTH, "compute.stack=3"), tmp_path / "stacked")
    assert groups == [["a"], ["b"], ["c"]]
    assert all(furthest(update, at_once[client]) < 1e-5 for client, update in alone.items())


@pytest.mark.parametrize(
    "setting",
    [
        "training.task_schedule=joint",
        "training.task_schedule=epoch",
        "sharing.adaptive={}",
        "sharing.rules=[{heads.*: task}, {'encoder.layer.0.*': task}, {'*': all}]",
    ],
)
def test_a_client_with_two_tasks_trains_by_itself_where_a_step_is_not_of_one_task_and_encoder(
    setting, make_config, tmp_path, monkeypatch
):
    alone = answers(make_config(*ALIKE, BOTH, setting), tmp_path / "alone")
    groups = watch_stacks(monkeypatch)
    at_once = answers(make_config(*ALIKE, BOTH, setting, "compute.stack=3"), tmp_path / "stacked")
    assert sorted(client for group in groups for client in group) == ["b", "c"]
    assert furthest(alone["a"], at_once["a"]) == 0.0


def watch_stacks(monkeypatch) -> list[list[str]]:
    """The clients of every stack that is trained from here on."""
    groups = []

    def watched(stacks, members, *others, **options):
        groups.append([member.client for member in members])
        return real(stacks, members, *others, **options)

    real = client_stack.train_stack
    monkeypatch.setattr(client_stack, "train_stack", watched)
    return groups


@pytest.mark.parametrize(
    ("mode", "stacks"), [("local", [2, 4]), ("centralized", [1]), ("centralized_single_task", [1, 2])]
)
def test_what_clients_keep_between_rounds_is_the_same_either_way(mode, stacks, make_config, monkeypatch):
    options = [*ALIKE, f"mode={mode}", "training.num_rounds=2"]
    alone = start_run(make_config(*options), "alone")
    groups = watch_stacks(monkeypatch)
    at_once = start_run(make_config(*options, "compute.stack=6"), "stacked")
    assert [sorted(map(len, groups[:half])) for half in (len(stacks), None)] == [stacks, sorted(stacks * 2)]
    kept = [sorted((run.path / "clients").rglob("round-0002.safetensors")) for run in (alone, at_once)]
    assert len(kept[0]) == len(kept[1]) == sum(stacks)
    for expected, found in ((load_file(first), load_file(second)) for first, second in zip(*kept, strict=True)):
        assert found.keys() == expected.keys()
        assert {name.partition("|")[0] for name in found} >= {"optimizer.exp_avg", "optimizer.step"}
        assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) < 1e-5


def test_one_whose_optimizer_does_not_fit_a_stack_trains_by_itself(make_config, tmp_path, monkeypatch):
    def fits_others(slots, keys, trained):
        return None if "heads.sentiment.weight" in keys else real(slots, keys, trained)

    real = client_stack.named_state
    monkeypatch.setattr(client_stack, "named_state", fits_others)
    alone = answers(make_config(*ALIKE), tmp_path / "alone")
    groups = watch_stacks(monkeypatch)
    at_once = answers(make_config(*ALIKE, "compute.stack=6"), tmp_path / "stacked")
    assert list(map(len, groups)) == [4]
    same = [client for client, update in alone.items() if furthest(update, at_once[client]) == 0.0]
    assert same == ["sentiment_client_1", "sentiment_client_2"]


@pytest.mark.parametrize("schedule", ["joint", "annealed", "epoch"])
def test_clients_of_one_task_are_stacked_under_any_schedule(schedule, make_config, tmp_path):
    options = [*ALIKE, f"training.task_schedule={schedule}", "compute.stack=6"]
    if schedule == "joint":
        options.append("training.gradients=pcgrad")
    even = answers(make_config(*ALIKE, "compute.stack=6"), tmp_path / "even")
    found = answers(make_config(*options), tmp_path / "other")
    assert all(furthest(update, found[client]) == 0.0 for client, update in even.items())


def test_clients_that_learn_the_weights_of_losses_train_by_themselves(make_config, tmp_path):
    options = [*ALIKE, "training.loss_weighting=uncertainty"]
    alone = answers(make_config(*options), tmp_path / "alone")
    at_once = answers(make_config(*options, "compute.stack=6"), tmp_path / "stacked")
    for client, update in alone.items():
        assert any(key.name.endswith(".log_variance") for key in update.delta)
        assert furthest(update, at_once[client]) == 0.0


def test_one_that_fails_costs_only_itself(make_config, tmp_path, monkeypatch):
    def broken(stacks, members, *others, **options):
        found = zip(members, real(stacks, members, *others, **options), strict=True)
        failed = TrainingFailed("broken")
        return [replace(one, trained=failed) if member.client == first else one for member, one in found]

    real = client_stack.train_stack
    monkeypatch.setattr(client_stack, "train_stack", broken)
    config = make_config(*ALIKE, "compute.stack=6")
    first = next(iter(prepare(config).clients))
    found = answers(config, tmp_path)
    assert [client for client, answer in found.items() if isinstance(answer, Failure)] == [first]
    assert found[first].reason == "broken"


def test_without_memory_for_all_they_train_in_halves(make_config, tmp_path, monkeypatch):
    sizes = []

    def small(stacks, members, *rest, **options):
        sizes.append(len(members))
        if len(members) > 1:
            raise torch.OutOfMemoryError
        return real(stacks, members, *rest, **options)

    real = client_stack.train_stack
    monkeypatch.setattr(client_stack, "train_stack", small)
    found = answers(make_config(*ALIKE, "compute.stack=6"), tmp_path)
    assert all(isinstance(answer, Update) for answer in found.values())
    assert sizes.count(1) == 6


def test_after_the_deadline_nobody_trains(make_config, tmp_path):
    prepared = prepare(make_config("compute.stack=2"))
    engine = open_engine(prepared, create_run(tmp_path, "run"))
    found = list(engine.run(jobs(prepared, 1), deadline=0.0))
    engine.close()
    assert len(found) == 6
    assert {answer.reason for answer in found} == {"no answer within 0 s (federation.round_timeout)"}


PRIVATE = (
    "privacy.example.noise_multiplier=0.8",
    "privacy.example.max_grad_norm=0.2",
    "training.local_epochs=1",
    "training.batch_size=4",
)


def test_a_private_round_is_the_same_however_many_train_at_once(make_config, tmp_path):
    alone = answers(make_config(*ALIKE, *PRIVATE), tmp_path / "alone")
    at_once = answers(make_config(*ALIKE, *PRIVATE, "compute.stack=6"), tmp_path / "stacked")
    assert len(alone) == 6
    for client, update in alone.items():
        assert furthest(update, at_once[client]) < 1e-5
        assert update.extra["example_privacy"].values == at_once[client].extra["example_privacy"].values
        assert update.seen == at_once[client].seen


@pytest.mark.slow
def test_a_private_run_of_stacks_has_the_statement_of_others_and_resumes_as_they_do(make_config, run_once, monkeypatch):
    def ledgers(run):
        return [event["tasks"] for event in raw_events(run) if event["event"] == "example_privacy"]

    def weights(run):
        return next(event["weights_sha256"] for event in reversed(raw_events(run)) if event["event"] == "end")

    stacks = (*PRIVATE, "compute.stack=3")
    whole = run_once(*stacks)
    assert ledgers(whole) == ledgers(run_once(*PRIVATE))

    class Killed(BaseException):
        pass

    real, calls = client_stack.train_stack, iter(range(100))

    def dying(*given, **named):
        if next(calls) == 3:
            raise Killed
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(client_stack, "train_stack", dying)
        with pytest.raises(Killed):
            start_run(make_config(*stacks), "killed")
    resumed = resume_run(RunFolder(Path(make_config().output) / "killed"))
    assert weights(resumed) == weights(whole)
    assert ledgers(resumed) == ledgers(whole)
    for path in whole.clients.glob("*/example_privacy.json"):
        assert (resumed.clients / path.parent.name / path.name).read_bytes() == path.read_bytes()


def test_a_client_that_may_not_release_more_costs_itself_alone(make_config, tmp_path):
    config = make_config(
        *PRIVATE, "privacy.example.noise_multiplier=null", "privacy.example.epsilon=3", "compute.stack=3"
    )
    client = "sentiment_client_1"
    ledger = tmp_path / "run" / "clients" / client / "example_privacy.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text('{"sentiment": {"a": {"chance": 0.2, "noise_multiplier": 1.0, "times": 10}}}')
    prepared = prepare(config)
    folder = RunFolder(tmp_path / "run")
    engine = open_engine(prepared, folder)
    try:
        found = {answer.client: answer for answer in engine.run(jobs(prepared, 1), 60)}
    finally:
        engine.close()
    assert isinstance(found[client], Failure)
    assert "would make 15 steps in all, and the noise was found for 10" in found[client].reason
    assert sum(isinstance(answer, Update) for answer in found.values()) == 5
