"""The loop against a plain one, written without any of the package's training code."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import get_scheduler

from fedmtl.model.multitask import MultiTaskModel
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Key
from fedmtl.tasks.task import Task
from fedmtl.training import optimizer
from fedmtl.training.local import planned_steps, train
from fedmtl.training.local_method import LocalSettings
from same_masks import Recorder, replayed

from .small_client import (
    CPU,
    CROSS,
    DUAL,
    SINGLE,
    TOKENIZER,
    bind,
    bind_rows,
    copied,
    furthest,
    labels_of,
    make_methods,
    make_settings,
    make_shard,
    make_task,
    small_model,
    texts_of,
)

SEED = 11
THREE = make_task(
    "three", text=("a", "b"), pair="dual", pool="cls", labels=("x", "y", "z"), class_weights=(1.0, 4.0, 0.5)
)
BALANCED = make_task("single", pool="mean", class_weights="balanced")
# Two epochs of 12 examples by 5 are 6 steps, so half a round of warm-up is 3 of them.
WARM = {"warmup_rounds": 0.5, "num_rounds": 3, "local_epochs": 2}

CASES: dict[str, tuple[tuple[Task, ...], dict[str, Any]]] = {
    "single, pooler, cross-entropy": ((SINGLE,), {}),
    "cross, cls, one balanced output, warm-up then linear": ((CROSS,), {"schedule": "linear", **WARM}),
    "dual, mean, squared error, cosine": ((DUAL,), {"schedule": "cosine", **WARM}),
    "balanced cross-entropy, mean, warm-up then constant": ((BALANCED,), {"schedule": "constant", **WARM}),
    "dual, three weighted classes, two epochs, steps": (
        (THREE,),
        {"schedule": "step", "step_rounds": 1, "step_factor": 0.5, "local_epochs": 2},
    ),
    "three tasks, own rates and weights, clipped": (
        (SINGLE, CROSS, DUAL),
        {
            "max_grad_norm": 0.05,
            "weight_decay": 0.3,
            "rates": {"cross": 3e-3},
            "loss_weights": {"dual": 2.5, "single": 0.4},
        },
    ),
    "heads with a rate of their own": ((SINGLE, DUAL), {"head_rate": 20, "weight_decay": 0.3, "learning_rate": 1e-3}),
    "unclipped": ((SINGLE,), {"max_grad_norm": 0}),
    # A key's bias has no gradient but rounding, which a small epsilon would blow up through the proximal term.
    "proximal": ((SINGLE, DUAL), {"proximal": 0.7, "local_epochs": 2, "epsilon": 1e-2, "learning_rate": 0.01}),
    "sgd with momentum, decayed": (
        (SINGLE, CROSS),
        {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "weight_decay": 0.1, "schedule": "linear"},
    ),
    "other moments": ((SINGLE,), {"betas": (0.7, 0.9), "epsilon": 1e-4, "weight_decay": 0}),
    "local steps": ((SINGLE, DUAL), {"local_steps": 7}),
}


class PlainModel(nn.Module):
    """A Hugging Face encoder and linear heads, fed by the tokenizer's own padding."""

    def __init__(self, model: MultiTaskModel) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(model.encoder)
        self.masks: list[dict[str, Tensor]] = []
        self.heads = nn.ModuleDict()
        for name, head in model.heads.named_children():
            self.heads[name] = nn.Linear(head.in_features, head.out_features, dtype=torch.float64)
            self.heads[name].load_state_dict(head.state_dict())

    def forward(self, task: Task, columns: list[list[str]]) -> Tensor:
        head = self.heads[task.name]
        if not task.is_dual:
            return head(self.vectors(task, columns))
        length = max(len(ids) for column in columns for ids in TOKENIZER(column)["input_ids"])
        u, v = (self.vectors(task, [column], length) for column in columns)
        return head(torch.cat([u, v, (u - v).abs(), u * v, 10 * F.cosine_similarity(u, v)[:, None]], dim=1))

    def vectors(self, task: Task, columns: list[list[str]], length: int | None = None) -> Tensor:
        padding = {"padding": "longest"} if length is None else {"padding": "max_length", "max_length": length}
        batch = TOKENIZER(*columns, truncation=False, return_tensors="pt", return_token_type_ids=True, **padding)
        with replayed(self.masks.pop(0), batch["attention_mask"]) if self.masks else nullcontext():
            output = self.encoder(**batch)
        if task.pool == "pooler":
            return output.pooler_output
        if task.pool == "cls":
            return output.last_hidden_state[:, 0]
        real = batch["attention_mask"].bool()
        return torch.stack([row[keep].mean(0) for row, keep in zip(output.last_hidden_state, real, strict=True)])


def plain_loss(task: Task, outputs: Tensor, rows: Any) -> Tensor:
    labels = torch.tensor(labels_of(task)[rows])
    if task.kind == "regression":
        return F.mse_loss(outputs[:, 0], labels.double())
    given = {"balanced": [1.5, 0.75], "none": [1.0] * len(task.labels)}.get(
        task.class_weights if isinstance(task.class_weights, str) else "", task.class_weights
    )
    weight = torch.tensor(given, dtype=torch.float64)
    if task.outputs == 2:
        return F.cross_entropy(outputs, labels, weight=weight)
    each = F.binary_cross_entropy_with_logits(outputs[:, 0], labels.double(), weight=weight[labels], reduction="sum")
    return each / weight[labels].sum()


def plain_optimizer(model: PlainModel, options: LocalSettings) -> torch.optim.Optimizer:
    tables_norms_biases = ("_embeddings.weight", "LayerNorm.weight", "bias")
    named = list(model.named_parameters())
    decay = options.weight_decay
    groups = [
        {
            "params": [
                p for name, p in named if name.endswith(tables_norms_biases) == plain and ("heads." in name) == head
            ],
            "weight_decay": 0.0 if plain else decay,
            "factor": options.head_rate if head else 1.0,
        }
        for plain in (False, True)
        for head in (False, True)
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=options.momentum, weight_decay=decay)
    return torch.optim.AdamW(
        groups, lr=1.0, betas=options.betas, eps=options.epsilon, weight_decay=decay, foreach=False
    )


def plain_scheduler(optimizer: torch.optim.Optimizer, options: LocalSettings, steps_per_round: int) -> Any:
    """Transformers' own schedules over the steps of all rounds."""
    if options.schedule == "step":
        every = options.step_rounds * steps_per_round
        return torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=options.step_factor)
    name = "constant_with_warmup" if options.schedule == "constant" else options.schedule
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=int(options.warmup_rounds * steps_per_round),
        num_training_steps=options.num_rounds * steps_per_round,
    )


def plain_rounds(
    model: PlainModel, tasks: dict[str, Task], rounds: list[list[tuple[str, Any]]], options: LocalSettings
) -> None:
    optimizer = plain_optimizer(model, options)
    scheduler = plain_scheduler(optimizer, options, len(rounds[0]))
    for steps in rounds:
        received = [p.detach().clone() for p in model.parameters()]
        for name, rows in steps:
            task = tasks[name]
            columns = [[column[row] for row in rows] for column in texts_of(task)]
            loss = plain_loss(task, model(task, columns), rows) * options.loss_weights[name]
            optimizer.zero_grad()
            loss.backward()
            moving = [(p, before) for p, before in zip(model.parameters(), received, strict=True) if p.grad is not None]
            if "fedprox" in options.methods:
                term = sum(((p - before) ** 2).sum() for p, before in moving) * options.methods["fedprox"]["mu"] / 2
                term.backward()
            norm = torch.cat([p.grad.flatten() for p, _ in moving]).norm().item()
            if options.max_grad_norm and norm > options.max_grad_norm:
                for p, _ in moving:
                    p.grad *= options.max_grad_norm / (norm + 1e-6)
            factor = scheduler.get_last_lr()[0]
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rates[name] * factor * group["factor"]
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = factor
            scheduler.step()


@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_plain_loop(case, tmp_path):
    tasks, options = CASES[case]
    check_equality(tasks, options, small_model(*tasks), tmp_path)


@pytest.mark.parametrize("case", [case for case in CASES if not any(task.is_dual for task in CASES[case][0])])
def test_training_with_dropout_equals_a_plain_loop_with_the_same_masks(case, tmp_path):
    tasks, options = CASES[case]
    model = small_model(*tasks, dropout=0.2)
    model.encoder.set_attn_implementation("eager")
    model.draw_masks = Recorder()
    check_equality(tasks, options, model, tmp_path)
    assert model.draw_masks.passes


@pytest.mark.parametrize("case", ["three tasks, own rates and weights, clipped", "sgd with momentum, decayed"])
def test_training_by_the_encoders_own_module_equals_a_plain_loop(case, tmp_path):
    tasks, options = CASES[case]
    model = small_model(*tasks)
    model.layout = None
    check_equality(tasks, options, model, tmp_path)


def check_equality(tasks: tuple[Task, ...], options: dict[str, Any], model: MultiTaskModel, tmp_path: Path) -> None:
    """Two rounds by our loop and by the plain one give the same values."""
    settings = make_settings(*tasks, **options)
    plain = PlainModel(model).train()
    bound = bind(model)
    before = copied(bound.weights())
    shards = {task.name: make_shard(task, tmp_path) for task in tasks}
    kept: Any = None
    for number in (1, 2):
        seed = derive_seed(SEED, number)
        methods = make_methods(settings)
        trained = train(
            bound, shards, settings, round_number=number, seed=seed, device=CPU, saved=kept, methods=methods
        )
        kept = trained.optimizer
    rounds = [list(planned_steps(shards, settings, derive_seed(SEED, number), number)) for number in (1, 2)]
    plain.masks = getattr(model.draw_masks, "passes", []).copy()
    plain_rounds(plain, {task.name: task for task in tasks}, rounds, settings)
    expected = {name.removeprefix("encoder.") if "heads." not in name else name: p for name, p in named(plain)}
    after = bound.weights()
    assert furthest({Key("", key.name): value for key, value in after.items()}, keyed(expected)) < 1e-10
    assert furthest(after, before) > 1e-3


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def keyed(values: dict[str, Tensor]) -> dict[Key, Tensor]:
    return {Key("", name): value for name, value in values.items()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_vocabulary_slices_change_nothing(optimizer, dropout, tmp_path):
    tasks = tuple(replace(task, dropout=dropout) for task in (SINGLE, CROSS, DUAL))
    settings = make_settings(
        *tasks, optimizer=optimizer, momentum=0.9, weight_decay=0.5, max_grad_norm=0.1, proximal=0.3, learning_rate=3e-3
    )
    shards = {task.name: make_shard(task, tmp_path, [0, 1, 4, 7, 9]) for task in tasks}
    model = small_model(*tasks, dropout=dropout)
    table = Key("all", model.table)
    full = bind(model)
    start = full.weights()[table].clone()
    train(full, shards, settings, round_number=1, seed=SEED, device=CPU, methods=make_methods(settings))
    sliced, rows = bind_rows(small_model(*tasks, dropout=dropout), shards)
    assert len(rows) < 0.3 * len(start)
    train(sliced, shards, settings, round_number=1, seed=SEED, device=CPU, methods=make_methods(settings))
    whole = {**sliced.weights(), table: start.index_copy(0, torch.from_numpy(rows), sliced.weights()[table])}
    assert furthest(whole, full.weights()) < 1e-12
    # Neither decay nor momentum touches a row that no text uses.
    unused = torch.ones(len(start), dtype=torch.bool)
    unused[rows] = False
    assert torch.equal(full.weights()[table][unused], start[unused])


def test_fused_adamw_follows_the_plain_one_in_single_precision(tmp_path, monkeypatch):
    settings = make_settings(SINGLE, local_epochs=5)
    shards = {"single": make_shard(SINGLE, tmp_path)}
    fused, plain = bind(small_model(SINGLE, dtype=torch.float32)), bind(small_model(SINGLE, dtype=torch.float32))
    before = copied(fused.weights())
    train(fused, shards, settings, round_number=1, seed=SEED, device=CPU)
    adamw = optimizer.adamw
    monkeypatch.setattr(optimizer, "adamw", lambda *lists, fused, **options: adamw(*lists, fused=False, **options))
    train(plain, shards, settings, round_number=1, seed=SEED, device=CPU)
    # 15 steps of 1e-3 move a weight by up to 1.5e-2; rounding may differ by a thousandth of that.
    assert furthest(fused.weights(), before) > 5e-3
    assert furthest(fused.weights(), plain.weights()) < 1.5e-5
