"""What the student learns on: every task's texts, with copies where asked, as tokens with the teacher's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmtl.compress.augment.copies import Say, augment
from fedmtl.compress.augment.settings import AugmentSettings
from fedmtl.compress.distill.student import Student
from fedmtl.compress.distill.teaching import Teaching, make_shard, teach
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.examples import Examples, join_examples
from fedmtl.tasks.load import TaskData


@dataclass(frozen=True)
class Lessons:
    """Shards by task; counts of given examples, added copies and cut texts; whether both sides read the same tokens."""

    train: dict[str, Shard]
    validation: dict[str, Shard]
    taught_validation: dict[str, Shard]
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
    """Everything tokenized and asked before the first step; the texts are not needed again."""
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
        own, truncated[name] = make_shard(task, examples[name], student.encoder.tokenizer, length, cache)
        say(f"{name}: asking the teacher about {len(own):,} examples")
        train[name], is_same = teach(teaching, task, examples[name], own, cache)
        same = same and is_same
    validation = {
        name: make_shard(task, data[name].validation, student.encoder.tokenizer, length, cache)[0]
        for name, task in saved.tasks.items()
    }
    taught = {
        name: make_shard(task, data[name].validation, saved.encoder.tokenizer, length, cache)[0]
        for name, task in saved.tasks.items()
    }
    counts = {name: len(own) for name, own in given.items()}
    added = {name: len(examples[name]) - count for name, count in counts.items()}
    return Lessons(train, validation, taught, counts, added, truncated, same)
