"""A finished model as teacher of all its tasks, and what the student learns on.

That is every task's texts, with copies where the settings say so, as tokens with the teacher's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.compress.augment.copies import Say, augment
from fedmtl.compress.augment.settings import AugmentSettings
from fedmtl.compress.distill.student import Student
from fedmtl.errors import ModelError
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import SavedModel, load_model, model_digest
from fedmtl.tasks.batches import Shard, save_outputs
from fedmtl.tasks.examples import Examples, join_examples
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.metrics import Sums, sum_predictions
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import open_tokens, tokenize
from fedmtl.training.local import predict

BATCH = 128


@dataclass(frozen=True)
class Teaching:
    """A teacher on its device, and the name of what it answers."""

    saved: SavedModel
    bound: BoundModel
    digest: str
    device: torch.device


def open_teaching(folder: Path, device: torch.device) -> Teaching:
    """The model of a finished run; values that stayed at clients are an error."""
    saved = load_model(folder)
    missing = saved.missing(list(saved.tasks))
    if missing is not None:
        raise ModelError(
            f"{folder}: `{missing}` stayed at the clients, so there is no whole teacher; train with it at level task"
            " (sharing.rules) and distil that run"
        )
    saved.model.to(device)
    bound = BoundModel(saved.model, saved.plan, list(saved.tasks), "", saved.weights, device=device, read=True)
    saved.model.eval()
    return Teaching(saved, bound, model_digest(folder, saved), device)


def make_shard(task: Task, examples: Examples, tokenizer: Any, max_length: int, cache: Path) -> tuple[Shard, int]:
    """The examples as tokens, and how many were cut."""
    folder, truncated = tokenize(task, examples.texts, tokenizer, max_length, cache)
    return Shard(folder, examples.labels, np.arange(len(examples), dtype=np.int64)), truncated


def teach(teaching: Teaching, task: Task, examples: Examples, shard: Shard, cache: Path) -> tuple[Shard, bool]:
    """The student's shard with the teacher's outputs beside it, and whether both read the same tokens."""
    saved = teaching.saved
    read, _ = make_shard(task, examples, saved.encoder.tokenizer, saved.max_length, cache)
    path = read.tokens.with_name(f"{read.tokens.name}-{teaching.digest}-{task.name}-distil.npy")
    if not path.exists():
        save_outputs(path, predict(teaching.bound, task.name, read, BATCH, teaching.device)[0])
    return replace(shard, teacher=path), _same_tokens(read.tokens, shard.tokens)


def evaluate(bound: BoundModel, shards: Mapping[str, Shard], device: torch.device) -> dict[str, Sums]:
    """Every task's predictions on its validation examples, added up."""
    found: dict[str, Sums] = {}
    for name, shard in shards.items():
        outputs, loss = predict(bound, name, shard, BATCH, device)
        found[name] = sum_predictions(bound.model.tasks[name], outputs, shard.labels, loss, True)
    return found


def _same_tokens(first: Path, second: Path) -> bool:
    if first == second:
        return True
    parts = zip(open_tokens(first).parts, open_tokens(second).parts, strict=True)
    return all(
        np.array_equal(above.offsets, below.offsets) and np.array_equal(above.ids, below.ids) for above, below in parts
    )


@dataclass(frozen=True)
class Lessons:
    """Shards by task; counts of given examples, added copies and cut texts; whether both sides read the same tokens."""

    train: dict[str, Shard]
    validation: dict[str, Shard]
    teacher_validation: dict[str, Shard]
    given: dict[str, int]
    added: dict[str, int]
    truncated: dict[str, int]
    same_tokens: bool


def prepare_lessons(
    teaching: Teaching,
    student: Student,
    data: Mapping[str, TaskData],
    settings: AugmentSettings,
    encoder: str,
    cache: Path,
    seed: int,
    say: Say,
) -> Lessons:
    """Tokenize all examples and compute the teacher's outputs before the first step; texts are not needed again."""
    given = {name: join_examples(part.task, [part.train, *part.client_train.values()]) for name, part in data.items()}
    examples: Mapping[str, Examples] = (
        augment(settings, given, encoder, cache.parent / "augmented", seed, teaching.device, say)
        if settings.sources
        else given
    )
    saved, length = teaching.saved, teaching.saved.max_length
    train: dict[str, Shard] = {}
    truncated: dict[str, int] = {}
    same = True
    for name, task in saved.tasks.items():
        shard, truncated[name] = make_shard(task, examples[name], student.encoder.tokenizer, length, cache)
        say(f"{name}: asking the teacher about {len(shard):,} examples")
        train[name], is_same = teach(teaching, task, examples[name], shard, cache)
        same = same and is_same
    validation = {
        name: make_shard(task, data[name].validation, student.encoder.tokenizer, length, cache)[0]
        for name, task in saved.tasks.items()
    }
    teacher_validation = {
        name: make_shard(task, data[name].validation, saved.encoder.tokenizer, length, cache)[0]
        for name, task in saved.tasks.items()
    }
    counts = {name: len(part) for name, part in given.items()}
    added = {name: len(examples[name]) - count for name, count in counts.items()}
    return Lessons(train, validation, teacher_validation, counts, added, truncated, same)
