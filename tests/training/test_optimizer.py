from typing import Any

import pytest
import torch
from torch import nn

from fedmtl.model.multitask import BoundModel, Buffers, undecayed
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.task import Task
from fedmtl.training.local import train
from fedmtl.training.optimizer import FlatOptimizer, clip

from .small_client import CPU, CROSS, DUAL, PLAN, SINGLE, bind, copied, make_settings, make_shard, small_model

LAYER_MATRICES = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
)  # fmt: skip


def test_decay_is_for_matrices_and_never_for_tables_norms_and_biases():
    model = small_model(SINGLE, DUAL)
    decayed = {f"encoder.layer.{layer}.{name}.weight" for layer in (0, 1) for name in LAYER_MATRICES}
    decayed |= {"pooler.dense.weight", "heads.single.weight", "heads.dual.weight"}
    assert undecayed(model) == set(model.canonical()) - decayed


def test_every_value_is_a_view_of_one_buffer_and_so_is_its_gradient(tmp_path):
    bound = bind(small_model(CROSS, SINGLE))
    assert sum(parameter.numel() for parameter in bound.parameters.values()) == bound.flat.values.numel()
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    train(bound, shards, make_settings(CROSS, SINGLE), round_number=1, seed=0, device=CPU)
    buffer = bound.buffers.by_name["gradients"]
    for key, parameter in bound.parameters.items():
        place = bound.flat.spans[key]
        assert parameter.data_ptr() == bound.flat.values[place].data_ptr()
        assert parameter.grad.data_ptr() == buffer[place].data_ptr()


def test_one_task_is_two_calls_and_each_head_more_is_one_more_run(tmp_path):
    def runs(*tasks: Task) -> list[tuple[float, int]]:
        bound = bind(small_model(*tasks))
        optimizer = FlatOptimizer(bound, make_settings(*tasks, weight_decay=0.5))
        for task in tasks:
            optimizer.backward(task.name, sum(p.sum() for p in used(bound, task.name)))
        return [(run.decay, len(run.keys)) for run in optimizer._of(tasks[0].name)]

    # 2 layers of 6 matrices, the pooler's and the head's; their biases, 2 x 2 norms of 2, the embeddings' and 3 tables.
    assert runs(SINGLE) == [(0.5, 14), (0.0, 14 + 8 + 2 + 3)]
    assert sorted(runs(SINGLE, CROSS)) == [(0.0, 1), (0.0, 26), (0.5, 1), (0.5, 13)]


def used(bound: BoundModel, task: str) -> list[nn.Parameter]:
    return [bound.parameters[key] for key in bound.views[task].values()]


def test_what_a_loss_does_not_reach_neither_decays_nor_ages(tmp_path):
    # The pooler serves SINGLE only; AdamW with decay would shrink it in CROSS's steps too.
    settings = make_settings(CROSS, SINGLE, weight_decay=0.5, learning_rate=0.1)
    bound = bind(small_model(CROSS, SINGLE))
    before = copied(bound.weights())
    shards = {"cross": make_shard(CROSS, tmp_path)}
    state = train(bound, shards, settings, round_number=1, seed=0, device=CPU).optimizer
    pooler = Key("all", "pooler.dense.weight")
    assert torch.equal(bound.weights()[pooler], before[pooler])
    assert pooler not in state["exp_avg"]
    shards["single"] = make_shard(SINGLE, tmp_path)
    state = train(bound, shards, settings, round_number=2, seed=0, device=CPU, saved=state).optimizer
    # Three steps a task and round: the encoder took 3 + 6, the pooler 3.
    assert state["step"][pooler] == 3
    assert state["step"][Key("all", "encoder.layer.0.output.dense.weight")] == 9


def test_fixed_values_are_not_given_to_the_optimizer():
    bound = bind(small_model(SINGLE), plan=SharingPlan((("heads.*", "task"), ("*", "fixed"))))
    assert {key.name for key in bound.flat.spans} == {"heads.single.weight", "heads.single.bias"}


def test_clipping_scales_all_gradients_to_the_norm_and_leaves_short_ones():
    first, second = torch.tensor([3.0]).double(), torch.tensor([4.0]).double()
    clip([first, second], 10.0)
    assert (first.item(), second.item()) == (3, 4)
    clip([first, second], 0)
    assert (first.item(), second.item()) == (3, 4)
    # The norm is 5: a tenth of it leaves 0.3 and 0.4.
    clip([first, second], 0.5)
    assert (first.item(), second.item()) == pytest.approx((0.3, 0.4), rel=1e-5)


def test_buffers_are_kept_from_one_client_to_the_next():
    model = small_model(SINGLE)
    weights, buffers = initial_weights(model, PLAN), Buffers()
    first = BoundModel(model, PLAN, ["single"], "a", weights, buffers=buffers)
    again = BoundModel(model, PLAN, ["single"], "b", weights, buffers=buffers)
    assert first.flat.values.data_ptr() == again.flat.values.data_ptr()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_head_rests_with_its_state_while_its_task_is_not_stepped(optimizer, tmp_path):
    settings = make_settings(CROSS, SINGLE, optimizer=optimizer, momentum=0.9, weight_decay=0.1, learning_rate=0.01)
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    bound = bind(small_model(CROSS, SINGLE))
    first = train(bound, shards, settings, round_number=1, seed=0, device=CPU).optimizer
    before = copied(bound.weights())
    state = {slot: copied(values) for slot, values in first.items()}
    only = {"single": shards["single"]}
    second = train(bound, only, settings, round_number=2, seed=1, device=CPU, saved=first).optimizer
    for leaf in ("weight", "bias"):
        resting, moving = Key("task:cross", f"heads.cross.{leaf}"), Key("task:single", f"heads.single.{leaf}")
        assert torch.equal(bound.weights()[resting], before[resting])
        assert not torch.equal(bound.weights()[moving], before[moving])
        for slot in state:
            assert torch.equal(second[slot][resting], state[slot][resting])
            assert not torch.equal(second[slot][moving], state[slot][moving])


def test_a_task_that_was_never_stepped_has_no_state(tmp_path):
    settings = make_settings(CROSS, SINGLE, local_steps=1)
    shards = {task.name: make_shard(task, tmp_path) for task in (CROSS, SINGLE)}
    bound = bind(small_model(CROSS, SINGLE))
    before = copied(bound.weights())
    trained = train(bound, shards, settings, round_number=1, seed=0, device=CPU)
    key = Key("task:single", "heads.single.weight")
    assert torch.equal(bound.weights()[key], before[key])
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
            trained = train(bound, shards, settings, round_number=number, seed=number, device=CPU, saved=kept)
            kept = trained.optimizer if keep else None
        return bound.weights()

    handed_over, forgotten = two_rounds(keep=True), two_rounds(keep=False)
    made: list[FlatOptimizer] = []

    def build_once(bound: BoundModel, *rest: Any) -> FlatOptimizer:
        made.append(made[0] if made else FlatOptimizer(bound, *rest))
        return made[-1]

    monkeypatch.setattr("fedmtl.training.local.FlatOptimizer", build_once)
    continuous = two_rounds(keep=False)
    assert len(made) == 2
    assert all(torch.equal(handed_over[key], continuous[key]) for key in continuous)
    table = Key("all", "embeddings.word_embeddings.weight")
    assert not torch.equal(forgotten[table], continuous[table])


def test_no_state_is_returned_where_none_is_kept(tmp_path):
    settings = make_settings(SINGLE, keep_optimizer=False)
    shards = {"single": make_shard(SINGLE, tmp_path)}
    assert train(bind(small_model(SINGLE)), shards, settings, round_number=1, seed=0, device=CPU).optimizer == {}
