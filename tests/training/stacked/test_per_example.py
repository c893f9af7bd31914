"""Clipped examples and noise in a stack, against its clients trained one after another, and one example at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl.errors import FedmtlError, PolicyError
from fedmtl.methods.example_account import LEDGER
from fedmtl.methods.example_gradients import PrivateGradients, PrivateStack
from fedmtl.methods.example_privacy import NAME
from fedmtl.methods.noise import KeyedNoise
from fedmtl.model.bert.cpu.per_example import Squares
from fedmtl.model.bert.stacked_per_example import ExampleRecords
from fedmtl.model.multitask import BoundModel, Inputs, MultiTaskModel
from fedmtl.model.per_example import Clip
from fedmtl.sharing.plan import SharingPlan, Weights
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import collate
from fedmtl.tasks.task import HiddenLayer, Task
from fedmtl.training.local import Trained, to_tensors, train
from fedmtl.training.local_method import LocalSettings, Release
from fedmtl.training.stacked import stack as stack_module
from fedmtl.training.stacked.loop import Stacks, train_stack
from fedmtl.training.stacked.outcomes import Outcome
from fedmtl.training.stacked.plan import Member, named_state
from fedmtl.training.stacked.shape import reached, stacks_with

from ..small_client import (
    CPU,
    DUAL,
    PLAN,
    SINGLE,
    copied,
    furthest,
    make_methods,
    make_settings,
    make_shard,
    make_task,
    small_model,
)

OPTIONS = {
    "epsilon": None, "noise_multiplier": 0.5, "delta": 1e-5, "max_grad_norm": 0.3, "sampling": "poisson",
    "examples_at_once": None,
    "max_sampling_rate": None,
    "masked": False,
}  # fmt: skip
EXAMPLES = (range(12), [0, 1, 4, 7, 9], [2, 3, 5])
MEAN = make_task("single", pool="mean")
CLS = make_task("single", pool="cls")
WEIGHTED = make_task("single", pool="cls", class_weights=(1.0, 4.0))
HIDDEN = make_task("single", pool="mean", head=HiddenLayer(6, "relu", 0.0))
HIDDEN_DUAL = make_task("dual", text=("a", "b"), pair="dual", pool="mean", head=HiddenLayer(None, "gelu", 0.0))
SCORES = make_task("scores", kind="regression", pool="pooler")
FIXED = SharingPlan((("embeddings.word*", "fixed"), ("heads.*", "task"), ("*", "all")))
NORMS = SharingPlan((("*LayerNorm*", "all"), ("*.bias", "all"), ("heads.*", "task"), ("*", "fixed")))
ODD = SharingPlan(
    (
        ("encoder.layer.0.attention.self.key.weight", "fixed"),
        ("encoder.layer.1.attention.self.value.bias", "fixed"),
        ("encoder.layer.1.attention.self.query.*", "fixed"),
        ("embeddings.token_type*", "fixed"),
        ("heads.*", "task"),
        ("*", "all"),
    )
)
Client = tuple[Member, Weights]


def private(settings: LocalSettings, **options: Any) -> LocalSettings:
    return replace(settings, methods={**settings.methods, NAME: {**OPTIONS, **options}})


def release_of(folder: Path, name: str) -> Release:
    return Release(bytes(range(32)), name, folder / name)


def make_client(
    model: MultiTaskModel, tasks: Sequence[Task], examples: Any, number: int, plan: SharingPlan, folder: Path
) -> Client:
    shards = {task.name: make_shard(task, folder, list(examples)) for task in tasks}
    views = plan.keys(model.canonical(), list(shards), "")
    keys = {name: key for view in views.values() for name, key in view.items()}
    weights = {key: value.clone() for key, value in initial_weights(model, plan).items() if key in keys.values()}
    fixed = frozenset(name for name, key in keys.items() if not plan.trains(key))
    return Member(f"c{number}", tuple(tasks), shards, 100 + number, keys, None, fixed=fixed), weights


def make_clients(model: MultiTaskModel, tasks: Sequence[Task], folder: Path, plan: SharingPlan = PLAN) -> list[Client]:
    pairs = [(task, examples) for task in tasks for examples in EXAMPLES]
    return [make_client(model, [task], own, number, plan, folder) for number, (task, own) in enumerate(pairs)]


def one_by_one(
    model: MultiTaskModel, clients: Sequence[Client], settings: LocalSettings, folder: Path, plan: SharingPlan = PLAN,
    round_number: int = 1, kept: Sequence[Any] | None = None,
) -> list[tuple[Trained, Weights]]:  # fmt: skip
    found = []
    for number, (member, weights) in enumerate(clients):
        bound = BoundModel(model, plan, list(member.shards), "", copied(weights), None)
        methods = replace(
            make_methods(settings), release=partial(release_of, folder, f"{member.client}.{round_number}")
        )
        trained = train(
            bound, member.shards, settings, round_number=round_number, seed=member.seed, device=CPU,
            saved=kept[number] if kept else None, methods=methods,
        )  # fmt: skip
        found.append((trained, copied(bound.weights())))
    return found


def enter(
    model: MultiTaskModel, member: Member, settings: LocalSettings, folder: Path, round_number: int = 1
) -> Member:
    if NAME not in settings.methods:
        return member
    method = PrivateStack(settings.methods[NAME])
    release = partial(release_of, folder, f"{member.client}.{round_number}")
    return method.enter(member, model, settings, round_number, release)


def stacked(
    model: MultiTaskModel, clients: Sequence[Client], settings: LocalSettings, folder: Path,
    stacks: Stacks | None = None, round_number: int = 1,
) -> list[Outcome]:  # fmt: skip
    stacks = stacks or Stacks(model, CPU, next(model.parameters()).dtype)
    members = [enter(model, member, settings, folder, round_number) for member, _ in clients]
    values = [{name: weights[key] for name, key in member.keys.items()} for member, weights in clients]
    return train_stack(stacks, members, values, settings, round_number=round_number)


def check_same(
    clients: Sequence[Client], expected: Sequence[tuple[Trained, Weights]], found: Sequence[Outcome], far: float = 1e-9
) -> None:
    for (member, before), (trained, values), outcome in zip(clients, expected, found, strict=True):
        assert isinstance(outcome.trained, Trained)
        assert (outcome.trained.steps, outcome.trained.seen) == (trained.steps, trained.seen)
        assert outcome.trained.losses == pytest.approx(trained.losses, rel=1e-5 if far > 1e-9 else 1e-7)
        assert outcome.trained.sent == trained.sent
        moved = {member.keys[name]: value for name, value in outcome.delta.items()}
        assert furthest({key: values[key] - before[key] for key in moved}, moved) < far
        assert all(torch.equal(values[key], before[key]) for key in values if key not in moved)
        assert max(float(value.abs().max()) for value in moved.values()) > 1e-4
        assert trained.optimizer.keys() == outcome.trained.optimizer.keys()
        for slot, tensors in trained.optimizer.items():
            assert furthest(tensors, outcome.trained.optimizer[slot]) < max(far, 1e-8)


# Norms and sums, one example at a time.

TASKS = {
    "pooler": SINGLE, "mean": MEAN, "cls": CLS, "hidden": HIDDEN, "dual": DUAL, "dual hidden": HIDDEN_DUAL,
    "dual cls": make_task("dual", text=("a", "b"), pair="dual", pool="cls"),
}  # fmt: skip
HEADS_ALONE = SharingPlan((("heads.*", "task"), ("*", "fixed")))
PLANS = {"heads alone": HEADS_ALONE, "whole": PLAN, "table fixed": FIXED, "biases and norms": NORMS, "odd ones": ODD}


def gradients_of(model: MultiTaskModel, member: Member, names: Sequence[str], example: int) -> dict[str, Tensor]:
    """One example's gradient, by autograd."""
    (task,) = member.tasks
    shard = member.shards[task.name]
    inputs, labels = to_tensors(collate(shard, np.asarray([example]), model.pad_id, None), CPU)
    parameters = [getattr(*model.canonical()[name]) for name in names]
    for parameter in parameters:
        parameter.requires_grad_(True)
    model.adds_gradients = True
    loss = task.kind_of.losses(task, model(task.name, Inputs(*vars(inputs).values())), labels).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    model.adds_gradients = False
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }


@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_norms_and_sums_are_those_of_one_example_at_a_time(
    kind: str, plan: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, tolerance = TASKS[kind], 1e-10 if dtype == torch.float64 else 1e-5
    model = small_model(task, dtype=dtype)
    clients = make_clients(model, [task], tmp_path, PLANS[plan])
    seen: list[Squares] = []
    original = ExampleRecords.squares

    def squares(self: ExampleRecords) -> Squares:
        seen.append(original(self))
        return seen[-1]

    monkeypatch.setattr(ExampleRecords, "squares", squares)
    monkeypatch.setattr(KeyedNoise, "add_to", lambda *given: None)
    # Every client has all its examples in one lot.
    training = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 1.0, "weight_decay": 0.0, "local_steps": 1}
    settings = private(make_settings(task, **training, schedule="constant", batch_size=12))
    found = stacked(model, clients, settings, tmp_path)
    clipped = 0
    for k, ((member, _), outcome) in enumerate(zip(clients, found, strict=True)):
        names = reached(model, task.name, member.keys, member.fixed)
        ((_, lot),) = enter(model, member, settings, tmp_path / "again").lots.steps  # type: ignore[union-attr]
        assert len(lot) == len(member.shards[task.name])
        expected = [gradients_of(model, member, names, example) for example in lot]
        true = torch.stack(
            [torch.stack([g.double().square().sum() for g in own.values()]).sum().sqrt() for own in expected]
        )
        squares_of = Squares(seen[0].found[k, : len(lot)], seen[0].aligned[k, : len(lot)])
        torch.testing.assert_close(squares_of.found.sqrt(), true, rtol=tolerance, atol=0)
        assert not seen[0].found[k, len(lot) :].any()
        assert not seen[0].aligned[k, len(lot) :].any()
        factors = Clip(0.3, 1.0, dtype).factors(Squares(true.square(), squares_of.aligned))
        torch.testing.assert_close(
            factors, (0.3 / true).clamp(max=1.0), rtol=2e-5 if tolerance < 1e-9 else 5e-3, atol=0
        )
        clipped += int((factors < 1).sum())
        for name in names:
            total = sum(own[name] * factor.to(dtype) for own, factor in zip(expected, factors, strict=True))
            torch.testing.assert_close(
                outcome.delta[name], -total / len(lot), rtol=1e-6 if dtype == torch.float64 else 1e-4, atol=tolerance
            )
    assert clipped


# A round, against clients by themselves: the same lots and noise.

CASES: Mapping[str, Any] = {
    "uneven lots": ((SINGLE,), {}),
    "lots larger than a pass": ((MEAN,), {"batch_size": 11, "at_once": 2}),
    "one example a pass": ((CLS,), {"at_once": 1}),
    "dual pairs": ((DUAL,), {"local_epochs": 2, "at_once": 3}),
    "a hidden layer on two texts": ((HIDDEN_DUAL,), {"local_epochs": 2}),
    "weights of classes": ((WEIGHTED,), {"local_epochs": 2}),
    "two tasks, own rates, weights and batches": (
        (SINGLE, SCORES),
        {"weight_decay": 0.3, "rates": {"scores": 3e-3}, "loss_weights": {"single": 0.4}, "head_rate": 20,
         "batch_sizes": {"single": 7, "scores": 2}},
    ),
    "a bound of the whole gradient is not looked at": ((SINGLE,), {"max_grad_norm": 1e-6}),
    "proximal": ((SINGLE,), {"proximal": 0.7, "local_epochs": 2, "epsilon": 1e-2, "learning_rate": 0.01}),
    "sgd with momentum": ((SINGLE,), {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_a_stack_equals_its_clients_one_by_one(case: str, tmp_path: Path) -> None:
    tasks, given = CASES[case]
    training = dict(given)
    options = {"examples_at_once": training.pop("at_once", None)}
    model, settings = small_model(*tasks), private(make_settings(*tasks, **training), **options)
    clients = make_clients(model, tasks, tmp_path)
    check_same(
        clients,
        one_by_one(model, clients, settings, tmp_path / "1"),
        stacked(model, clients, settings, tmp_path / "2"),
    )
    for member, _ in clients:
        name = f"{member.client}.1/{LEDGER}"
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize("plan", list(PLANS))
def test_it_does_so_whatever_is_trained(plan: str, tmp_path: Path) -> None:
    model, settings = small_model(CLS), private(make_settings(CLS))
    clients = make_clients(model, [CLS], tmp_path, PLANS[plan])
    expected = one_by_one(model, clients, settings, tmp_path / "1", PLANS[plan])
    check_same(clients, expected, stacked(model, clients, settings, tmp_path / "2"))


def test_heads_alone_train_in_a_stack_without_noise_too(tmp_path: Path) -> None:
    model, settings = small_model(CLS), make_settings(CLS)
    clients = make_clients(model, [CLS], tmp_path, HEADS_ALONE)
    assert stacks_with(model, ["single"], HEADS_ALONE.keys(model.canonical(), ["single"], ""), HEADS_ALONE)
    expected = one_by_one(model, clients, settings, tmp_path / "1", HEADS_ALONE)
    check_same(clients, expected, stacked(model, clients, settings, tmp_path / "2"))


def test_it_does_so_in_single_precision(tmp_path: Path) -> None:
    model, settings = (
        small_model(MEAN, dtype=torch.float32),
        private(make_settings(MEAN, learning_rate=0.05, optimizer="sgd")),
    )
    clients = make_clients(model, [MEAN], tmp_path)
    expected = one_by_one(model, clients, settings, tmp_path / "1")
    check_same(clients, expected, stacked(model, clients, settings, tmp_path / "2"), far=1e-6)


SEVERAL = (MEAN, replace(DUAL, name="dual"), make_task("third", pool="mean", labels=("x", "y")))


@pytest.mark.parametrize("training", [{}, {"task_schedule": "round_robin", "local_steps": 7}])
def test_a_client_with_several_tasks_is_a_stack_of_one(training: Any, tmp_path: Path) -> None:
    model, settings = small_model(*SEVERAL), private(make_settings(*SEVERAL, **training))
    clients = [make_client(model, SEVERAL, range(12), 0, PLAN, tmp_path)]
    expected = one_by_one(model, clients, settings, tmp_path / "1")
    check_same(clients, expected, stacked(model, clients, settings, tmp_path / "2"))


def test_a_client_with_a_task_of_which_nothing_moves_trains_alone() -> None:
    plan = SharingPlan((("heads.third.*", "fixed"), ("heads.*", "task"), ("*", "fixed")))
    model = small_model(*SEVERAL)
    for tasks, label in ((["third", "single"], False), (["single", "third"], False), (["single"], True)):
        assert (stacks_with(model, tasks, plan.keys(model.canonical(), tasks, ""), plan) is not None) is label


def test_the_next_round_goes_on_with_what_optimizers_kept(tmp_path: Path) -> None:
    model, settings = small_model(SINGLE), private(make_settings(SINGLE))
    clients = make_clients(model, [SINGLE], tmp_path)
    stacks = Stacks(model, CPU, torch.float64)
    first = one_by_one(model, clients, settings, tmp_path / "1")
    check_same(clients, first, stacked(model, clients, settings, tmp_path / "2", stacks))
    later = []
    for (member, _), (trained, values) in zip(clients, first, strict=True):
        state = named_state(trained.optimizer, member.keys, reached(model, "single", member.keys))
        assert state is not None
        later.append((replace(member, optimizer=state), values))
    kept = [trained.optimizer for trained, _ in first]
    expected = one_by_one(model, later, settings, tmp_path / "1", round_number=2, kept=kept)
    check_same(later, expected, stacked(model, later, settings, tmp_path / "2", stacks, 2))
    assert len(stacks.made) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_lot_may_be_empty_or_one_example(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedNoise, "chosen", lambda self, num, chance: torch.arange(number))
    model, settings = small_model(MEAN), private(make_settings(MEAN, batch_size=2))
    clients = make_clients(model, [MEAN], tmp_path)
    expected = one_by_one(model, clients, settings, tmp_path / "1")
    assert ("single" in expected[0][0].losses) is bool(number)
    check_same(clients, expected, stacked(model, clients, settings, tmp_path / "2"))


def test_clients_have_noise_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(SINGLE)
    settings = private(
        make_settings(SINGLE, optimizer="sgd", learning_rate=1.0, local_steps=1),
        max_grad_norm=1e-9,
        noise_multiplier=1e9,
    )
    clients = [make_client(model, [SINGLE], range(12), number, PLAN, tmp_path) for number in (1, 2)]
    found = stacked(model, clients, settings, tmp_path)
    first, second = (torch.cat([value.reshape(-1) for value in outcome.delta.values()]) for outcome in found)
    # A lot has five examples: the noise of a value has a deviation of 1 / 5.
    for each in (first, second):
        assert float(each.std()) == pytest.approx(0.2, rel=0.02)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / len(first) ** 0.5


def test_noise_follows_the_weight_that_a_task_has_in_this_round(tmp_path: Path) -> None:
    """A stack is used again when weights of tasks have changed."""
    model = small_model(SINGLE)
    settings = private(
        make_settings(SINGLE, optimizer="sgd", learning_rate=1.0, local_steps=1),
        max_grad_norm=1e-9,
        noise_multiplier=1e9,
    )
    clients, stacks = make_clients(model, [SINGLE], tmp_path)[:1], Stacks(model, CPU, torch.float64)
    deviations = []
    for number, weight in enumerate((1.0, 8.0), 1):
        weighted = replace(settings, loss_weights={"single": weight})
        (outcome,) = stacked(model, clients, weighted, tmp_path, stacks, number)
        deviations.append(float(torch.cat([value.reshape(-1) for value in outcome.delta.values()]).std()))
    assert len(stacks.made) == 1
    assert deviations == pytest.approx([1 / 5, 8 / 5], rel=0.02)


def test_a_client_that_spent_its_budget_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    model, settings = small_model(SINGLE), private(make_settings(SINGLE), epsilon=3.0, noise_multiplier=None)
    member, _ = make_client(model, [SINGLE], range(12), 0, PLAN, tmp_path)
    method = PrivateStack(settings.methods[NAME])
    for digest in ("a", "b"):
        method.enter(member, model, settings, 1, lambda digest=digest: Release(bytes(32), digest, tmp_path / "c"))
    with pytest.raises(PolicyError, match="would make 9 steps in all, and the noise was found for 6"):
        method.enter(member, model, settings, 1, lambda: Release(bytes(32), "c", tmp_path / "c"))
    assert len(json.loads((tmp_path / "c" / LEDGER).read_text())["single"]) == 2


def test_a_client_with_its_token_rows_is_refused(tmp_path: Path) -> None:
    model, settings = small_model(SINGLE), private(make_settings(SINGLE))
    member, _ = make_client(model, [SINGLE], range(12), 0, PLAN, tmp_path)
    with pytest.raises(FedmtlError, match="vocabulary_slices must be false"):
        enter(model, replace(member, rows=np.arange(3)), settings, tmp_path)
    assert PrivateGradients.stacked is PrivateStack


def test_a_pass_has_place_for_most_lots() -> None:
    settings = make_settings(SINGLE, batch_size=64)
    # 64 + 3 * 8, in multiples of eight; as many as the device has place for; what the config says.
    assert PrivateStack(OPTIONS).most_examples(settings) == 88
    assert PrivateStack(OPTIONS).most_examples(replace(settings, batch_size=4096)) == 1024
    assert PrivateStack({**OPTIONS, "examples_at_once": 5}).most_examples(settings) == 5


def test_what_is_recorded_is_tried_first_without_a_trace(tmp_path: Path) -> None:
    """A term that a method adds to noisy gradients would otherwise be in a recorded step several times."""
    model, settings = small_model(SINGLE), private(make_settings(SINGLE, proximal=0.7, learning_rate=0.01))
    stacks = Stacks(model, CPU, torch.float64)
    stacked(model, make_clients(model, [SINGLE], tmp_path), settings, tmp_path, stacks)
    ((stack, steps),) = stacks.made.values()
    buffers = [buffer for block in stack.blocks for buffer in (block.gradients, block.values, *block.slots)]
    before = [buffer.clone() for buffer in (*buffers, stack.inputs.factors)]
    with steps._at_rest():
        stack.move()
        assert any(not torch.equal(*pair) for pair in zip(buffers, before, strict=False))
    assert all(torch.equal(*pair) for pair in zip((*buffers, stack.inputs.factors), before, strict=True))


def test_a_stack_clips_as_finely_as_it_computes() -> None:
    methods: list[Any] = [PrivateStack(OPTIONS)]
    fine, coarse = (stack_module._clip(methods, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert fine is not None
    assert coarse is not None
    # A norm of 10, of which half a unit in the last place of 24 or 8 bits is taken from the bound.
    long = Squares(torch.tensor([[100.0]]), torch.zeros(1, 1))
    assert float(fine.factors(long) * 10) == pytest.approx(0.3 * (1 - 1e-5), rel=1e-6)
    assert float(coarse.factors(long) * 10) == pytest.approx(0.3 * (1 - 1e-5 - 1 / 256), rel=1e-6)


def test_in_bf16_no_example_exceeds_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack whose clients have one example each moves by its clipped gradient."""
    monkeypatch.setattr(KeyedNoise, "add_to", lambda *given: None)
    task, training = MEAN, {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 1.0, "weight_decay": 0.0}
    model = small_model(task, dtype=torch.float32)
    clients = [make_client(model, [task], [number], number, PLAN, tmp_path) for number in range(12)]
    settings = private(
        make_settings(task, **training, local_steps=1, schedule="constant", batch_size=1), max_grad_norm=0.01
    )
    found = stacked(model, clients, settings, tmp_path, Stacks(model, CPU, torch.bfloat16))
    norms = [
        float(torch.stack([value.double().square().sum() for value in one.delta.values()]).sum().sqrt())
        for one in found
    ]
    assert min(norms) > 0.0095
    assert max(norms) <= 0.01
