"""A client small enough to follow: a two-layer encoder, 32 wide, and twelve examples per task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig

from fedmtl.capabilities import client_methods, local_methods
from fedmtl.config import Config, TaskConfig, TrainingConfig
from fedmtl.model.bert.layout import build_encoder, keep_heads
from fedmtl.model.encoder import describe_encoder
from fedmtl.model.multitask import BoundModel, MultiTaskModel, build_model
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.sharing.plan import Extra, Key, Rows, SharingPlan, Weights, take_rows, used_rows
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import tokenize
from fedmtl.tasks.words import split_words
from fedmtl.training.local_method import LocalClient, LocalMethods, LocalSettings, local_settings

CPU = torch.device("cpu")
TOKENIZER = basic_tokenizer()
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))

FIRST = (
    "a cat", "the very good film was not boring", "no", "dull dull dull", "we liked it a lot", "never again",
    "a b c d e f g", "so so", "the plot", "what a surprise it was", "meh", "one more time",
)  # fmt: skip
SECOND = FIRST[::-1]
# Four of class 0 and eight of class 1: balanced weights are 12 / (2 * 4) = 1.5 and 12 / (2 * 8) = 0.75.
CLASSES = np.array([0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1])
SCORES = (np.arange(12) / 11).astype(np.float32)


def make_task(name: str, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "kind": "classification", "text": ("a",), "label": "y", "metric": "accuracy", "labels": ("no", "yes"),
        "dropout": 0.0,
    }  # fmt: skip
    return Task(name, **{**values, **changes})


SINGLE = make_task("single", pool="pooler")
CROSS = make_task("cross", text=("a", "b"), pool="cls", outputs=1, class_weights="balanced")
TAGGED = make_task("tagged", kind="tagging", labels=("X", "Y"), metric="f1")
DUAL = make_task("dual", kind="regression", labels=(), text=("a", "b"), pair="dual", pool="mean")


def small_model(
    *tasks: Task, dropout: float = 0.0, dtype: torch.dtype = torch.float64, log_variances: bool = False, heads: int = 2
) -> MultiTaskModel:
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    keep_heads(config, heads)
    encoder = describe_encoder(build_encoder(config), TOKENIZER, "small", has_pooler=True)
    return build_model(encoder, {task.name: task for task in tasks}, seed=3, log_variances=log_variances).to(dtype)


def texts_of(task: Task) -> tuple[list[str], ...]:
    return (list(FIRST), list(SECOND)) if task.is_pair else (list(FIRST),)


def labels_of(task: Task) -> Any:
    if task.kind_of.by_word:
        counts = [len(split_words(text)) for text in FIRST]
        width = task.kind_of.num_outputs(task)
        return Sequences.of([[(n + at) % width for at in range(count)] for n, count in enumerate(counts)], np.int64)
    return CLASSES if task.kind_of.has_labels else SCORES


def make_shard(task: Task, cache: Path, indices: Any = None, labels: np.ndarray | None = None) -> Shard:
    folder, _ = tokenize(task, texts_of(task), TOKENIZER, 32 if task.windows is None else 6, cache)
    chosen = np.arange(12) if indices is None else np.asarray(indices, dtype=np.int64)
    return Shard(folder, labels_of(task) if labels is None else labels, chosen)


def bind(
    model: MultiTaskModel, weights: Weights | None = None, rows: Rows | None = None, plan: SharingPlan = PLAN
) -> BoundModel:
    return BoundModel(model, plan, list(model.tasks), "c1", weights or initial_weights(model, plan), rows)


def bind_rows(model: MultiTaskModel, shards: dict[str, Shard]) -> tuple[BoundModel, Rows]:
    """The same client with a token table of its own rows only."""
    rows = used_rows((ids for shard in shards.values() for ids in shard.used_ids()), model.pad_id)
    weights = initial_weights(model, PLAN)
    table = Key("all", model.table)
    weights[table] = take_rows(weights[table], rows)
    return bind(model, weights, rows), rows


def make_settings(
    *tasks: Task,
    rates: dict[str, float] | None = None,
    loss_weights: dict[str, float] | None = None,
    batch_sizes: dict[str, int] | None = None,
    keep_optimizer: bool = True,
    **training: Any,
) -> LocalSettings:
    """What a config with this training section gives to clients, its methods among it."""
    config = TrainingConfig.model_validate(
        {"batch_size": 5, "learning_rate": 1e-3, "num_rounds": 2, "task_weight_in": "loss", **training}
    )
    whole = Config(tasks={task.name: TaskConfig() for task in tasks} or {"none": TaskConfig()}, training=config)
    return local_settings(
        config,
        {task.name: (rates or {}).get(task.name) for task in tasks},
        {task.name: (loss_weights or {}).get(task.name, 1.0) for task in tasks},
        keep_optimizer=keep_optimizer,
        batch_sizes=batch_sizes,
        methods=client_methods(whole, PLAN, ()),
    )


def make_methods(settings: LocalSettings, received: Mapping[str, Extra] | None = None) -> LocalMethods:
    """The methods that the settings name, as a client makes them of a job."""
    return LocalMethods(local_methods(settings.methods), received or {})


def start_methods(
    settings: LocalSettings, bound: BoundModel, shards: Mapping[str, Shard], received: Mapping[str, Extra] | None = None
) -> LocalMethods:
    """The same, with the client's round begun."""
    methods = make_methods(settings, received)
    methods.start(LocalClient(bound, shards, CPU, seed=0, round=1))
    return methods


def furthest(first: Weights, second: Weights) -> float:
    """The largest difference between two sets of values, which have the same keys."""
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def copied(weights: Weights) -> Weights:
    return {key: value.clone() for key, value in weights.items()}
