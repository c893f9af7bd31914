from dataclasses import replace

import pytest
import torch

from fedmtl.config import PruningConfig, ServerOptimizerConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.checkpoint import load_checkpoint, save_checkpoint
from fedmtl.federation.client_stack import stack_label
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import Codecs, State
from fedmtl.federation.pruning import prunable_names, prune, share_after, sparsity
from fedmtl.federation.server import rounds
from fedmtl.federation.wire import decode_job, encode_job
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan

from .fake_engine import ENCODER, PLAN, FakeEngine, head, make_strategy, scores

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
    assert later.pruned[A].tolist() == [[False, True], [False, False]]


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
    assert set(later.pruned) == {A}


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
    strategy = make_strategy(server_optimizer=ServerOptimizerConfig(kind=kind, learning_rate=0.1).model_dump())
    settings = PruningConfig(amount=0.34, rounds=1, start_round=0)
    strategy = replace(strategy, pruning=settings, prunable=frozenset(strategy.names))
    start = State(0, {key: torch.zeros(1) for key in (ENCODER, head("sst2"), head("stsb"))}, PLAN)
    turns = list(rounds(start, strategy, FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))
    assert [turn.state.weights[ENCODER].item() for turn in turns] == [0.0] * 4
    assert turns[-1].state.weights[head("sst2")] > 0
    assert turns[-1].state.pruned[ENCODER].all()


@pytest.mark.parametrize("down", ["fp32", "fp16", "int8"])
def test_a_job_tells_what_is_pruned_and_a_zero_decodes_to_zero(down):
    torch.manual_seed(0)
    value = torch.randn(33, 40) * torch.logspace(-6, 0, 40)
    key = Key("all", "layer")
    state = State(1, {key: value, head("sst2"): torch.zeros(1)}, PLAN)
    state = prune(state, PruningConfig(amount=0.3, rounds=1), {"layer"})
    strategy = replace(make_strategy(), codecs=Codecs(down=down), names=("layer", "heads.sst2.w"))
    job = Dispatch(strategy).job("train", state, "a", ("sst2",), None, 2, {})
    read = decode_job(encode_job(job))
    # .3 of 33 * 40 = 1320 are 396.
    assert int(read.pruned[key].sum()) == 396
    assert torch.equal(read.pruned[key], state.pruned[key])
    assert not read.weights[key][state.pruned[key]].any()
    # int8 makes zeros of small weights, which are to train on all the same.
    assert bool((read.weights[key] == 0).sum() > 396) == (down == "int8")
    assert Dispatch(strategy).job("evaluate", state, "a", ("sst2",), None, 2, {}).pruned == {}


def test_a_checkpoint_keeps_the_masks(tmp_path):
    state = prune(make_state(1), PruningConfig(amount=0.5, rounds=1), {"a", "b"})
    save_checkpoint(tmp_path, state)
    read = load_checkpoint(tmp_path)
    assert read.pruned.keys() == state.pruned.keys()
    assert all(torch.equal(read.pruned[key], mask) for key, mask in state.pruned.items())


def test_clients_of_a_pruning_run_are_not_stacked():
    job = Dispatch(make_strategy()).job(
        "train", State(0, {ENCODER: torch.zeros(1), head("sst2"): torch.zeros(1)}, PLAN), "a", ("sst2",), None, 1,
        {"pruning": True},
    )  # fmt: skip
    assert stack_label(job, None) is None
