from dataclasses import replace

import pytest
import torch

from federation.fake_engine import ENCODER, PLAN, FakeEngine, head, make_server, scores, start
from fedmtl.config import PruningConfig, ServerOptimizerConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.checkpoint import load_checkpoint, save_checkpoint
from fedmtl.federation.client_stack import stack_label
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.filters.error_feedback import NAME as ERROR_FEEDBACK
from fedmtl.federation.filters.error_feedback import RESIDUAL
from fedmtl.federation.messages import Codecs, State
from fedmtl.federation.server import rounds
from fedmtl.federation.wire import decode_job, encode_job
from fedmtl.methods.pruning import Pruning, check_received, prunable_names, prune, pruned_weights, share_after, sparsity
from fedmtl.sharing.plan import FILTER_PREFIX, Extra, Key, SharingPlan, slot_name
from fedmtl.sharing.weights import initial_weights, linear_weights
from fedmtl.training.local import train
from training.small_client import CPU, CROSS, DUAL, SINGLE, bind, make_methods, make_settings, make_shard, small_model
from training.small_client import PLAN as CLIENT_PLAN

RESIDUAL_SLOT = slot_name(ERROR_FEEDBACK, RESIDUAL, FILTER_PREFIX)
A, B = Key("all", "a"), Key("task:sst2", "b")


def make_state(round_number=1, **changes) -> State:
    weights = {A: torch.tensor([[0.5, -0.1], [0.3, -0.9]]), B: torch.tensor([[0.2, -0.4, 0.8, 0.05, -0.7, 0.6]])}
    weights[Key("all", "bias")] = torch.tensor([0.01])
    return replace(State(round_number, weights, PLAN), **changes)


def test_the_schedule_by_hand():
    even = PruningConfig(amount=0.6, rounds=3, start_round=2)
    assert [share_after(even, number) for number in range(6)] == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.6])
    # Thirds of the way: 1 - (2/3)^3 = 19/27, 1 - (1/3)^3 = 26/27, 1.
    cubic = replace_schedule(even, "cubic")
    assert [share_after(cubic, number) for number in range(1, 6)] == pytest.approx(
        [0, 0.6 * 19 / 27, 0.6 * 26 / 27, 0.6, 0.6]
    )


def replace_schedule(settings: PruningConfig, schedule: str) -> PruningConfig:
    return PruningConfig.model_validate({**settings.model_dump(), "schedule": schedule})


def test_one_threshold_for_all_layers_and_exactly_so_many_weights():
    # Ten weights, a half in two rounds: 25% are 2.5, which rounds to 2 (.05 and .1); then 5: .2, .3 and .4 too.
    settings = PruningConfig(amount=0.5, rounds=2)
    first = prune(make_state(1), settings, {"a", "b"})
    assert (first.weights[A] == 0).tolist() == [[False, True], [False, False]]
    assert (first.weights[B] == 0).tolist() == [[False, False, False, True, False, False]]
    second = prune(replace(first, round=2), settings, {"a", "b"})
    assert (second.weights[A] == 0).tolist() == [[False, True], [True, False]]
    assert (second.weights[B] == 0).tolist() == [[True, True, False, True, False, False]]
    assert second.weights[Key("all", "bias")] == 0.01
    assert sparsity(second.weights, {"a", "b"}) == {
        "linear": {"weights": 10, "zeros": 5},
        "all": {"weights": 11, "zeros": 5},
    }


def test_a_pruned_weight_stays_so_even_where_it_has_grown_and_a_chance_zero_is_free():
    settings = PruningConfig(amount=0.2, rounds=1)
    state = prune(make_state(1), settings, {"a", "b"})
    weights = {key: value + 5 for key, value in state.weights.items()}
    weights[A][0, 0] = 0.0
    later = prune(replace(state, round=2, weights=weights), settings, {"a", "b"})
    assert later.weights[A].tolist() == [[0.0, 0.0], [pytest.approx(5.3), pytest.approx(4.1)]]
    assert later.weights[B][0, 3] == 0
    assert pruned_weights(later)[A].tolist() == [[False, True], [False, False]]


def test_equal_weights_are_pruned_in_order():
    state = State(1, {A: torch.ones(3, 2)}, PLAN)
    assert prune(state, PruningConfig(amount=0.5, rounds=1), {"a"}).weights[A].tolist() == [[0, 0], [0, 1], [1, 1]]


def test_what_became_fixed_is_not_pruned_further():
    state = prune(make_state(1), PruningConfig(amount=0.2, rounds=3), {"a", "b"})
    fixed = Key("fixed", "b")
    weights = {A: state.weights[A], fixed: state.weights[B]}
    # Two thirds of .2 of the four that are left are .53, so one: the one there is already.
    later = prune(replace(state, round=2, weights=weights), PruningConfig(amount=0.2, rounds=3), {"a", "b"})
    assert torch.equal(later.weights[fixed], weights[fixed])
    assert set(pruned_weights(later)) == {A}


def test_only_what_the_server_has_and_trains_is_prunable():
    plan = SharingPlan((("heads.*", "client"), ("old.*", "fixed"), ("*", "all")))
    names = ["old.weight", "layer.0.weight", "layer.1.weight", "heads.sst2.weight"]
    assert prunable_names(PruningConfig(), plan, names) == {"layer.0.weight", "layer.1.weight"}
    assert prunable_names(PruningConfig(layers=["layer.1.*"]), plan, names) == {"layer.1.weight"}
    with pytest.raises(ConfigError, match=r"training.pruning.layers: `heads.\*` matches no linear weight"):
        prunable_names(PruningConfig(layers=["heads.*"]), plan, names)


@pytest.mark.parametrize("kind", ["none", "fedavgm", "fedadam", "fedyogi"])
def test_the_servers_momentum_does_not_move_a_pruned_weight(kind):
    # Three prunable numbers, all 0 at the start: after round 0 one of them, the first, is pruned for good.
    server = make_server(server_optimizer=ServerOptimizerConfig(kind=kind, learning_rate=0.1).model_dump())
    settings = PruningConfig(amount=0.34, rounds=1, start_round=0)
    names = frozenset(server.names)
    server = replace(server, methods=[*server.methods, Pruning(settings, names, names)])
    start = State(0, {key: torch.zeros(1) for key in (ENCODER, head("sst2"), head("stsb"))}, PLAN)
    turns = list(rounds(start, server, FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))
    assert [turn.state.weights[ENCODER].item() for turn in turns] == [0.0] * 4
    assert turns[-1].state.weights[head("sst2")] > 0
    # One of three is due, and zero it stays; at the start the other two are zero by chance.
    counts = [(event.round, event.target, event.pruned, event.linear.zeros) for turn in turns for event in turn.events]
    assert counts == [(0, 0.34, 1, 3), (1, 0.34, 1, 1), (2, 0.34, 1, 1), (3, 0.34, 1, 1)]
    assert pruned_weights(turns[-1].state)[ENCODER].all()


@pytest.mark.parametrize("down", ["fp32", "fp16", "int8"])
def test_a_job_tells_what_is_pruned_and_a_zero_decodes_to_zero(down):
    torch.manual_seed(0)
    value = torch.randn(33, 40) * torch.logspace(-6, 0, 40)
    key = Key("all", "layer")
    state = State(1, {key: value, head("sst2"): torch.zeros(1)}, PLAN)
    state = prune(state, PruningConfig(amount=0.3, rounds=1), {"layer"})
    server = replace(make_server(), codecs=Codecs(down=down), names=("layer", "heads.sst2.w"))
    given = Pruning(PruningConfig(), {"layer"}, {"layer"}).before_round(state, {}, {})
    job = Dispatch(server).job("train", state, "a", ("sst2",), None, 2, {}, {"pruning": given.extra})
    read = decode_job(encode_job(job))
    mask, sent = read.extra["pruning"].slot("mask")[key], pruned_weights(state)[key]
    # .3 of 33 * 40 = 1320 are 396.
    assert int(mask.sum()) == 396
    assert torch.equal(mask, sent)
    assert not read.weights[key][sent].any()
    # int8 makes zeros of small weights, which are to train on all the same.
    assert bool((read.weights[key] == 0).sum() > 396) == (down == "int8")


def test_a_job_for_scoring_has_no_masks():
    engine = FakeEngine()
    names = frozenset(make_server().names)
    server = make_server(methods=[Pruning(PruningConfig(amount=0.34, rounds=1, start_round=0), names, names)])
    list(rounds(start(), server, engine, lambda state: scores(sst2=0.5, stsb=0.5)))
    assert all(set(job.extra["pruning"].slot("mask")) == set(job.weights) for job in engine.jobs)
    state = prune(replace(start(), round=1), PruningConfig(amount=0.5, rounds=1), names)
    assert Dispatch(server).job("evaluate", state, "a", ("sst2",), None, 2, {}).extra == {}


def test_a_checkpoint_keeps_the_masks(tmp_path):
    state = prune(make_state(1), PruningConfig(amount=0.5, rounds=1), {"a", "b"})
    save_checkpoint(tmp_path, state)
    read = load_checkpoint(tmp_path)
    assert pruned_weights(read).keys() == pruned_weights(state).keys()
    assert all(torch.equal(pruned_weights(read)[key], mask) for key, mask in pruned_weights(state).items())


def test_clients_of_a_pruning_run_are_not_stacked():
    job = Dispatch(make_server()).job(
        "train", State(0, {ENCODER: torch.zeros(1), head("sst2"): torch.zeros(1)}, PLAN), "a", ("sst2",), None, 1,
        {"methods": {"pruning": {}}},
    )  # fmt: skip
    assert stack_label(job, None) is None


# At a client.

ADAMW = {"optimizer": "adamw", "weight_decay": 0.1}
SGD = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}


def masks_of(model, share=0.4):
    generator = torch.Generator().manual_seed(1)
    names = set(linear_weights(model))
    return {
        key: torch.rand(value.shape, generator=generator) < share
        for key, value in initial_weights(model, CLIENT_PLAN).items()
        if key.name in names
    }


def masked(pruned):
    """What a job brings of these masks."""
    return {"pruning": Extra(tensors={"mask": pruned})}


def test_linear_weights_are_matrices_of_layers_and_heads():
    names = linear_weights(small_model(SINGLE, DUAL))
    # Six a layer, two layers, the pooler, two heads.
    assert len(names) == 15
    assert not any("embeddings" in name or "LayerNorm" in name for name in names)
    assert names[-2:] == ["heads.single.weight", "heads.dual.weight"]


@pytest.mark.parametrize(
    "options",
    [ADAMW, SGD, {**ADAMW, "proximal": 0.1}, {**ADAMW, "task_schedule": "joint", "gradients": "pcgrad"}],
    ids=["adamw", "sgd", "fedprox", "pcgrad"],
)
def test_pruned_weights_are_zero_after_training_and_others_move(tmp_path, options):
    tasks = (SINGLE, CROSS)
    model = small_model(*tasks, dropout=0.1)
    shards = {task.name: make_shard(task, tmp_path) for task in tasks}
    settings = make_settings(*tasks, local_epochs=2, **options)
    settings = replace(settings, methods={**settings.methods, "pruning": {}})
    methods = make_methods(settings)
    first = train(bind(model), shards, settings, round_number=1, seed=5, device=CPU, methods=methods)
    pruned = masks_of(model)
    # The moments kept of weights that are pruned since would move them.
    bound = bind(model)
    before = {key: value.clone() for key, value in bound.weights().items()}
    methods = make_methods(settings, masked(pruned))
    second = train(bound, shards, settings, round_number=2, seed=6, device=CPU, saved=first.optimizer, methods=methods)
    assert second.steps > 0
    for key, mask in pruned.items():
        after = bound.weights()[key]
        assert not after[mask].any()
        assert (after[~mask] != before[key][~mask]).all()


def test_gradients_of_pruned_weights_do_not_count_when_gradients_are_clipped(tmp_path):
    # One step of rate 1 is as long as the clipped gradient, all of it in weights that are not pruned.
    model = small_model(SINGLE)
    shards = {"single": make_shard(SINGLE, tmp_path, range(5))}
    settings = make_settings(SINGLE, optimizer="sgd", learning_rate=1.0, weight_decay=0.0, max_grad_norm=1e-4)
    settings = replace(settings, methods={"pruning": {}})
    pruned = masks_of(model, 0.9)
    before = initial_weights(model, CLIENT_PLAN)
    bound = bind(model)
    methods = make_methods(settings, masked(pruned))
    train(bound, shards, settings, round_number=1, seed=5, device=CPU, methods=methods)
    moved = [
        (value - before[key]).masked_fill(pruned.get(key, torch.tensor(False)), 0.0)
        for key, value in bound.weights().items()
    ]
    assert float(torch.cat([step.reshape(-1) for step in moved]).norm()) == pytest.approx(1e-4, rel=1e-2)


def test_what_an_encoding_lost_of_a_pruned_weight_is_not_sent_any_more():
    [method] = make_methods(replace(make_settings(SINGLE), methods={"pruning": {}})).methods
    slots = {RESIDUAL_SLOT: {A: torch.ones(2, 2)}, "optimizer.exp_avg": {A: torch.ones(2, 2)}}
    mask = torch.tensor([[True, False], [False, False]])
    after = method.restore(slots, masked({A: mask})["pruning"])
    assert after[RESIDUAL_SLOT][A].tolist() == [[0, 1], [1, 1]]
    assert torch.equal(after["optimizer.exp_avg"][A], torch.ones(2, 2))
    assert method.restore(slots, Extra()) == slots


def test_what_is_no_mask_is_refused_at_a_site():
    assert check_received(masked({A: torch.ones(2, 2, dtype=torch.bool)})["pruning"], {}, {}) is None
    for extra in (
        masked({A: torch.ones(2, 2)})["pruning"],
        Extra({"more": 1}),
        Extra(tensors={"other": {A: torch.ones(2, 2, dtype=torch.bool)}}),
    ):
        assert "masks" in check_received(extra, {}, {})


def test_a_checkpoint_with_what_is_no_mask_is_refused():
    method = Pruning(PruningConfig(), {"a"}, {"a"})
    method.check(masked({A: torch.ones(2, 2, dtype=torch.bool)})["pruning"])
    for extra in (
        masked({A: torch.ones(2, 2)})["pruning"],
        masked({B: torch.ones(1, 6, dtype=torch.bool)})["pruning"],
        Extra({"more": 1}),
        Extra(tensors={"other": {A: torch.ones(2, 2, dtype=torch.bool)}}),
    ):
        with pytest.raises(ValueError):
            method.check(extra)
