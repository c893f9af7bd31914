"""SCAFFOLD, by hand for two clients, and in whole runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from federation.fake_engine import ENCODER, FakeEngine, head, make_server, scores, start
from fedmtl.capabilities import find
from fedmtl.errors import ConfigError
from fedmtl.experiment import run as driver
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.client import load_state
from fedmtl.federation.messages import ClientInfo, Update
from fedmtl.federation.server import rounds
from fedmtl.methods.example_gradients import PrivateGradients
from fedmtl.methods.scaffold import CONTROL, MOVES, NAME, Scaffold, ScaffoldClient
from fedmtl.model.multitask import Buffers, Flat
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import NO_EXTRA, Extra, SharingPlan, from_slots, is_personal
from fedmtl.training.local import train
from fedmtl.training.local_method import LocalClient, LocalMethods, Part, Release
from raw_events import raw_events
from training.small_client import CPU, SINGLE, bind, make_settings, make_shard, small_model

ON = "methods.scaffold={}"
RATE = 0.25
# (w - 2)^2 / 2 at one client and (w + 4)^2 at the other.
GRADIENTS = {"a": lambda w: w - 2, "b": lambda w: 2 * (w + 4)}


class TwoClients(FakeEngine):
    """Two clients that take two steps of plain SGD on a loss of one number each."""

    def __init__(self):
        super().__init__(self._train)
        self.stored = {"a": NO_EXTRA, "b": NO_EXTRA}

    def clients(self):
        return {"a": ClientInfo({"sst2": 1}), "b": ClientInfo({"sst2": 3})}

    def _train(self, job, factors=(1.0, 1.0)):
        keys = {ENCODER: slice(0, 1), head("sst2"): slice(1, 2)}
        values = torch.cat([job.weights[key] for key in keys]).clone()
        bound = SimpleNamespace(
            flat=Flat(values, keys),
            buffers=Buffers(),
            parameters={key: values[place] for key, place in keys.items()},
            views={"sst2": {key.name: key for key in keys}},
            model=SimpleNamespace(table="none"),
        )
        method = ScaffoldClient({"rate_factors": factors, "corrects_all_rows": False})
        method.start(
            LocalClient(bound, {}, torch.device("cpu"), 0, job.round),
            job.extra.get(NAME, NO_EXTRA),
            self.stored[job.client],
        )
        for _ in range(2):
            gradients = torch.tensor([GRADIENTS[job.client](float(values[0])), 0.0])
            method.gradient([Part(slice(0, 2), values, gradients)])
            values -= RATE * factors[job.round - 1] * gradients
            method.stepped(values)
        finished = method.finish(job.tasks)
        self.stored[job.client] = finished.stored
        delta = {key: values[place] - job.weights[key] for key, place in keys.items()}
        examples = {"sst2": 1 if job.client == "a" else 3}
        return Update(
            job.round, job.client, job.tasks, delta, None, examples, {"sst2": 1.0}, extra={NAME: finished.sent}
        )


def two_rounds(engine, **federation):
    server = make_server(**federation)
    method = Scaffold({"sst2": 1.0, "stsb": 1.0}, server.federation.average, [1.0, 1.0], "none")
    server = replace(
        server,
        settings=replace(server.settings, num_rounds=2, methods={NAME: {}}),
        methods=[*server.methods, method],
        active_tasks=lambda client, number: ("sst2",),
    )
    evaluated = rounds(start(), server, engine, lambda state: scores(sst2=0.5, stsb=0.5))
    return [done.state for done in evaluated if done.number]


def control(extra):
    """The control variate as a gradient, as in the paper: here it is a step, -RATE times that."""
    return extra.slot(CONTROL)[ENCODER].item() / -RATE


def test_two_clients_by_hand():
    engine = TwoClients()
    first, second = two_rounds(engine, average="uniform")
    # Round 1, nothing to correct. a: -2 -> .5, -1.5 -> .875, mean -1.75. b: 8 -> -2, 4 -> -3, mean 6.
    assert first.weights[ENCODER].item() == (0.875 - 3) / 2
    assert control(first.extra[NAME]) == (-1.75 + 6) / 2
    # Round 2 from -1.0625. a steps on g + 2.125 + 1.75: -3.0625 -> -1.265625, -3.265625 -> -1.41796875.
    # b steps on g + 2.125 - 6: 5.875 -> -1.5625, 4.875 -> -1.8125.
    assert second.weights[ENCODER].item() == -1.0625 + (-0.35546875 - 0.75) / 2
    assert control(engine.stored["a"]) == (-3.0625 - 3.265625) / 2
    assert control(engine.stored["b"]) == (5.875 + 4.875) / 2
    # c is the mean of both again: it moved by the mean of the changes.
    assert control(second.extra[NAME]) == (-3.1640625 + 5.375) / 2
    # The optimum is -2; without correction round 2 ends at -1.494140625, further from it.
    assert second.weights[ENCODER].item() == -1.615234375


def test_c_is_the_mean_by_the_weights_that_updates_have():
    first, _ = two_rounds(TwoClients())
    assert first.weights[ENCODER].item() == (1 * 0.875 + 3 * -3) / 4
    assert control(first.extra[NAME]) == (1 * -1.75 + 3 * 6) / 4


def test_a_client_that_is_not_sampled_counts_for_c():
    engine = TwoClients()
    first, _ = two_rounds(engine, average="uniform", clients_per_round=1, min_clients=1)
    (sampled,) = (client for client in "ab" if first.accepted.get(client) == 1)
    assert control(first.extra[NAME]) == {"a": -1.75, "b": 6.0}[sampled] / 2


def test_a_step_is_told_by_the_schedules_factor():
    # Half the rate, half the step: the control variate is the same, and corrects by half as much.
    engine = TwoClients()
    received = Extra(tensors={CONTROL: {ENCODER: torch.tensor([0.5])}})
    job = SimpleNamespace(
        client="a",
        weights={key: torch.zeros(1) for key in (ENCODER, head("sst2"))},
        round=2,
        tasks=("sst2",),
        extra={NAME: received},
    )
    update = engine._train(job, factors=[1.0, 0.5])
    # g -2, half of the rate: .25 and half of c: .5; g -1.5: .6875, then .9375.
    assert update.delta[ENCODER].item() == 0.9375
    # The mean of the steps .25 and .1875, and for a whole rate twice that.
    assert engine.stored["a"].slot(CONTROL)[ENCODER].item() == 0.4375
    assert update.extra[NAME].values == {MOVES: {"all": {"layer": 2}, "task:sst2": {"heads.sst2.w": 2}}}
    # The server finds the same: .9375 in two steps of half the rate, less c.
    method = Scaffold({"sst2": 1.0}, "uniform", [1.0, 0.5], "none")
    state = replace(start(), round=1, extra={NAME: received})
    method.before_round(state, {}, engine.clients())
    method.add(update)
    after = method.after_aggregation(state, state).state
    assert after.extra[NAME].slot(CONTROL)[ENCODER].item() == 0.5 + (0.9375 / (2 * 0.5) - 0.5) / 2


def digest(run):
    return raw_events(run)[-1]["weights_sha256"]


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_with_workers_or_without(make_config, monkeypatch):
    whole = start_run(make_config(ON, "training.num_rounds=3", "compute.workers=2"), "whole")
    record, recorded = driver._record, []

    def dies(*arguments, **named):
        # Round 0, 1, and then 2, which trains and is lost.
        if len(recorded) == 2:
            raise KeyboardInterrupt
        recorded.append(record(*arguments, **named))
        return recorded[-1]

    monkeypatch.setattr(driver, "_record", dies)
    config = make_config(ON, "training.num_rounds=3")
    with pytest.raises(KeyboardInterrupt):
        start_run(config, "killed")
    monkeypatch.setattr(driver, "_record", record)
    assert digest(resume_run(RunFolder(Path(config.output) / "killed"))) == digest(whole)
    assert digest(whole) != digest(start_run(make_config("training.num_rounds=3"), "plain"))


def test_sites_give_the_weights_of_one_machine(make_config, tmp_path):
    pytest.importorskip("flwr")
    from engines.flower.deployment import Server, Site

    config = make_config(ON, "federation.clients_per_task=1")
    alone = start_run(config, "alone")
    server = Server(config)
    sites = [
        Site(server, tmp_path / task, f"{task}_client", (task,)) for task in ("sentiment", "paraphrase", "similarity")
    ]
    deployed = server.finish()
    assert [site.finish() for site in sites] == [f"{deployed.name} is done"] * 3
    assert digest(deployed) == digest(alone)


def test_vocabulary_slices_change_nothing(make_config):
    sliced, unsliced = (
        start_run(make_config(ON, f"federation.vocabulary_slices={flag}"), flag) for flag in ("true", "false")
    )
    assert digest(sliced) == digest(unsliced)


def test_with_noise_on_gradients_every_row_is_corrected_whatever_the_texts(make_config, tmp_path):
    """Which rows moved by c would tell the words of the texts past all noise: here nothing else moves them."""
    still = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 1e-12, "weight_decay": 0.0}
    settings = make_settings(SINGLE, **still, local_steps=2)
    model = small_model(SINGLE)
    bound = bind(model)
    (table,) = (key for key in bound.flat.spans if key.name == model.table)
    before = bound.weights()[table].clone()
    options = {
        name: capability_options(make_config(ON, "privacy.example.noise_multiplier=1"), name)
        for name in ("example_privacy", NAME)
    }
    methods = LocalMethods(
        [PrivateGradients(options["example_privacy"]), ScaffoldClient({**options[NAME], "rate_factors": [1.0]})],
        {NAME: Extra(tensors={CONTROL: {table: torch.ones_like(before)}})},
        release=lambda: Release(bytes(32), "digest", tmp_path / "client"),
    )
    shards = {SINGLE.name: make_shard(SINGLE, tmp_path / "tokens")}
    train(bound, shards, settings, round_number=1, seed=1, device=CPU, methods=methods)
    moved = bound.weights()[table] - before
    torch.testing.assert_close(moved, torch.full_like(moved, 2.0))


def capability_options(config, name):
    return find(name).client_options(config, SharingPlan(()), ())


def test_what_stays_at_a_client_has_no_control_variate(make_config):
    config = make_config(ON, "sharing.rules=[{heads.*: client}, {'*': all}]")
    run = start_run(config, "personal")
    state = load_checkpoint(RunFolder(run.path).checkpoints)
    assert state.extra[NAME].slot(CONTROL)
    assert not any(is_personal(key) or key.name.startswith("heads.") for key in state.extra[NAME].slot(CONTROL))


def test_pruned_weights_stay_zero(make_config):
    config = make_config(ON, "training.pruning={amount: 0.3, rounds: 1}", "training.num_rounds=3")
    run = start_run(config, "pruned")
    *_, last = (event for event in raw_events(run) if event["event"] == "pruning")
    assert last["round"] == 3
    assert last["linear"]["zeros"] == last["pruned"] > 0


def test_stacked_clients_train_one_at_a_time(make_config):
    assert digest(start_run(make_config(ON, "compute.stack=3"), "stack")) == digest(start_run(make_config(ON), "alone"))


@pytest.mark.parametrize(
    "extra",
    [Extra({"x": 1}), Extra(tensors={"other": {}}), Extra(tensors={CONTROL: {ENCODER: torch.tensor([float("nan")])}})],
)
def test_what_is_no_control_variate_is_refused_wherever_it_comes_from(extra):
    with pytest.raises(ValueError, match="control variates alone"):
        Scaffold({}, "weighted", [], "none").check(extra)
    assert find(NAME).check_received(extra, {}, {}) is not None
    assert find(NAME).check_sent(extra, (), {}) is not None


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None, 10**12])
def test_a_number_of_steps_is_one(count):
    assert find(NAME).check_sent(Extra({MOVES: {"all": {"layer": count}}}), (), {}) is not None
    assert find(NAME).check_sent(Extra({MOVES: {"all": {"layer": 3}}}), (), {}) is None


def mean_of_clients(run, name, weights):
    """The mean of the clients' own control variates of a value that all share, from their folders."""
    total, parts = 0.0, 0.0
    for client, weight in weights.items():
        slots = load_state(run.clients / client, 2)
        (value,) = (value for key, value in from_slots(slots)[NAME].slot(CONTROL).items() if key.name == name)
        total, parts = total + weight, parts + weight * value
    return parts / total


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([], {"a": 20, "b": 40, "c": 60}),
        (["federation.average=uniform"], {"a": 1, "b": 1, "c": 1}),
        (["training.task_weight_in=loss", "tasks.similarity.weight=10"], {"a": 20, "b": 40, "c": 60}),
        (["tasks.similarity.weight=10"], {"a": 20, "b": 40, "c": 20 + 400}),
    ],
)
def test_c_stays_the_mean_of_the_clients(make_config, overrides, weights):
    clients = "clients={a: {tasks: [sentiment]}, b: {tasks: [paraphrase]}, c: {tasks: [sentiment, similarity]}}"
    run = start_run(make_config(ON, clients, *overrides), "mean")
    name = "encoder.layer.0.attention.self.query.weight"
    state = load_checkpoint(run.checkpoints)
    (c,) = (value for key, value in state.extra[NAME].slot(CONTROL).items() if key.name == name)
    torch.testing.assert_close(c, mean_of_clients(run, name, weights), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("federation.aggregation=clipped_mean", "federation.aggregation"),
        ("federation.aggregation={scopes: {all: multi_krum}}", "federation.aggregation.scopes.all"),
        ("federation.max_share=0.5", "federation.max_share"),
        ("federation.max_update_norm=5", "federation.max_update_norm"),
        ("federation.task_weighting={kind: progress}", "federation.task_weighting"),
        ("training={schedule: step, step_factor: 0, step_rounds: 1, num_rounds: 3}", "training.schedule"),
    ],
)
def test_what_its_control_variates_would_get_past_is_refused_by_name(make_config, setting, key):
    with pytest.raises(ConfigError, match=rf"^{key}: .*methods\.scaffold"):
        start_run(make_config(ON, setting), "refused")


def test_it_has_no_options(make_config):
    with pytest.raises(ConfigError, match=r"methods\.scaffold\.mu: unknown key"):
        start_run(make_config("methods.scaffold={mu: 1}"), "options")
