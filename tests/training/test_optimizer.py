from typing import Any

import pytest
import torch
from torch import nn

from fedmtl.model.keys import Key
from fedmtl.training.local import train
from fedmtl.training.optimizer import build_optimizer, clip, undecayed

from .small_client import CPU, CROSS, DUAL, SINGLE, bind, copied, make_settings, make_shard, small_model

LAYER_MATRICES = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
)  # fmt: skip


def test_decay_is_for_matrices_and_never_for_tables_norms_and_biases():
    model = small_model(SINGLE, DUAL)
    decayed = {f"encoder.layer.{layer}.{name}.weight" for layer in (0, 1) for name in LAYER_MATRICES}
    decayed |= {"pooler.dense.weight", "heads.single.weight", "heads.dual.weight"}
    assert undecayed(model) == set(model.canonical()) - decayed


def test_fixed_values_are_not_given_to_the_optimizer():
    free, fixed = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)
    parameters = {Key("all", "free"): free, Key("fixed", "fixed"): fixed}
    optimizer = build_optimizer(parameters, set(), make_settings())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [free]


def test_clipping_scales_all_gradients_to_the_norm_and_leaves_short_ones():
    first, second, unused = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0]).double(), torch.tensor([4.0]).double()
    clip([first, second, unused], 10.0)
    assert (first.grad.item(), second.grad.item()) == (3, 4)
    clip([first, second, unused], 0)
    assert (first.grad.item(), second.grad.item()) == (3, 4)
    # The norm is 5: a tenth of it leaves 0.3 and 0.4.
    clip([first, second, unused], 0.5)
    assert (first.grad.item(), second.grad.item()) == pytest.approx((0.3, 0.4), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_head_rests_with_its_state_while_its_task_is_not_stepped(optimizer, tmp_path):
    settings = make_settings(CROSS, SINGLE, optimizer=optimizer, momentum=0.9, weight_decay=0.1, learning_rate=0.01)
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    bound = bind(small_model(CROSS, SINGLE))
    first = train(bound, shards, settings, round_number=1, seed=0, device=CPU).optimizer
    before = copied(bound.values())
    state = {slot: copied(values) for slot, values in first.items()}
    only = {"single": shards["single"]}
    second = train(bound, only, settings, round_number=2, seed=1, device=CPU, kept=first).optimizer
    for leaf in ("weight", "bias"):
        resting, moving = Key("task:cross", f"heads.cross.{leaf}"), Key("task:single", f"heads.single.{leaf}")
        assert torch.equal(bound.values()[resting], before[resting])
        assert not torch.equal(bound.values()[moving], before[moving])
        for slot in state:
            assert torch.equal(second[slot][resting], state[slot][resting])
            assert not torch.equal(second[slot][moving], state[slot][moving])


def test_a_task_that_was_never_stepped_has_no_state(tmp_path):
    settings = make_settings(CROSS, SINGLE, local_steps=1)
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    bound = bind(small_model(CROSS, SINGLE))
    before = copied(bound.values())
    trained = train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    key = Key("task:single", "heads.single.weight")
    assert torch.equal(bound.values()[key], before[key])
    assert {slot: key in values for slot, values in trained.optimizer.items()} == {
        "step": False, "exp_avg": False, "exp_avg_sq": False,
    }  # fmt: skip
    assert set(trained.losses) == {"cross"}


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd", "momentum": 0.9}])
def test_kept_state_makes_two_rounds_one_training(options, tmp_path, monkeypatch):
    """Bit for bit: the second round with what the first kept, and with the first's optimizer itself."""
    settings = make_settings(SINGLE, DUAL, **options)
    shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, DUAL)}

    def two_rounds(keep: bool) -> dict[Key, Any]:
        bound = bind(small_model(SINGLE, DUAL, dtype=torch.float32))
        kept = None
        for number in (1, 2):
            trained = train(bound, shards, settings, round_number=number, seed=number, device=CPU, kept=kept)
            kept = trained.optimizer if keep else None
        return bound.values()

    handed_over, forgotten = two_rounds(keep=True), two_rounds(keep=False)
    made: list[torch.optim.Optimizer] = []

    def build_once(parameters: Any, *rest: Any) -> torch.optim.Optimizer:
        made.append(made[0] if made else build_optimizer(parameters, *rest))
        return made[-1]

    monkeypatch.setattr("fedmtl.training.local.build_optimizer", build_once)
    continuous = two_rounds(keep=False)
    assert len(made) == 2
    assert all(torch.equal(handed_over[key], continuous[key]) for key in continuous)
    table = Key("all", "embeddings.word_embeddings.weight")
    assert not torch.equal(forgotten[table], continuous[table])


def test_no_state_is_returned_where_none_is_kept(tmp_path):
    settings = make_settings(SINGLE, keep_optimizer=False)
    shards = {"single": make_shard(SINGLE, tmp_path)}
    assert train(bind(small_model(SINGLE)), shards, settings, round_number=1, seed=0, device=CPU).optimizer == {}
