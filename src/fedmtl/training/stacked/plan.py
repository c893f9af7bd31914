"""The steps of several clients side by side: who trains on which examples at which rate, as arrays.

What a client's optimizer brings from earlier rounds is part of the plan, since it decides how old a step is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.sharing.plan import Extra, Key, Rows, owner_task
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import open_tokens
from fedmtl.tasks.windows import NOWHERE
from fedmtl.training.local import num_steps, planned_steps
from fedmtl.training.local_method import LocalSettings, Step
from fedmtl.training.optimizer import STEP, Slots, rate_factor
from fedmtl.training.stacked.store import NOTHING, TokenStore

Named = dict[str, dict[str, Tensor]]
# The tokens of a client are padded to a multiple of this, so that few shapes occur.
TOKEN_MULTIPLE = 64
# The words of a batch are too.
LABEL_MULTIPLE = 256
# Of texts with windows, the sequences of a batch are.
SEQUENCE_MULTIPLE = 8
# Steps that are planned at a time: while they are computed on a GPU, the next are planned; it waits for the first.
FIRST_STEPS, STEPS = 16, 128
# How many there are for each client and step; see StackPlan.
FACTORS = 6


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state by slot and canonical name.

    `age` is how many steps the encoder has made, `head_ages` how many each task's head.
    """

    slots: Named
    age: int
    head_ages: Mapping[str, int]


FRESH_STATE = OptimizerState({}, 0, {})


def named_state(slots: Slots, keys: Mapping[str, Key], trained: Iterable[str]) -> OptimizerState | None:
    """Name the state that `FlatOptimizer.state` gave; None where the encoder's values made unequal numbers of steps."""
    steps = slots.get(STEP, {})
    ages = {name: int(steps[keys[name]]) if keys[name] in steps else 0 for name in trained}
    of_encoder = {age for name, age in ages.items() if owner_task(name) is None}
    if len(of_encoder) > 1:
        return None
    heads = {task: age for name, age in ages.items() if (task := owner_task(name)) is not None}
    named = {slot: {name: by_key[key] for name, key in keys.items() if key in by_key} for slot, by_key in slots.items()}
    return OptimizerState(named, max(of_encoder, default=0), heads)


def advance_state(
    state: OptimizerState, slots: Named, keys: Mapping[str, Key], steps: Mapping[str, int], optimizer: str
) -> Slots:
    """Return what `FlatOptimizer.state` would give after so many more steps of each task."""
    ages: dict[str | None, int] = {None: state.age + sum(steps.values())}
    ages |= {task: state.head_ages.get(task, 0) + more for task, more in steps.items()}
    moved = {name: age for name in next(iter(slots.values()), {}) if (age := ages.get(owner_task(name), 0))}
    found: Slots = {slot: {keys[name]: by_name[name] for name in moved} for slot, by_name in slots.items()}
    if optimizer == "adamw":
        found[STEP] = {keys[name]: torch.tensor(float(age)) for name, age in moved.items()}
    return {slot: by_name for slot, by_name in found.items() if by_name}


@dataclass(frozen=True)
class Lots:
    """The batches of a client's round where a method drew others than were planned, larger or smaller ones.

    `expected` is what the sum of a task's clipped gradients is divided by, `seen` how many examples were planned.
    """

    steps: Sequence[Step]
    expected: Mapping[str, float]
    seen: Mapping[str, int]


@dataclass(frozen=True)
class Member:
    """A client of a stack: its tasks with their examples, the keys of its values by canonical name, its optimizer.

    `received` is what capabilities sent it, by name; `fixed` are the names of values that do not train; `lots` are its
    batches where they are not those that are planned, and `accounts` what methods know of it besides, by name.

    A client with several tasks is the only one of its stack.
    """

    client: str
    tasks: tuple[Task, ...]
    shards: Mapping[str, Shard]
    seed: int
    keys: dict[str, Key]
    rows: Rows | None
    optimizer: OptimizerState = FRESH_STATE
    received: Mapping[str, Extra] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    lots: Lots | None = None
    accounts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StackPlan:
    """Some passes, as (passes, clients, ...): sequences, labels, the weight of each label in its loss, how far to go.

    `factors` are the learning rate, the two corrections of AdamW's means for their start, the loss's weight, and the
    corrections for the head; a rate of minus one marks a client that has no step. `tasks` are those of the passes where
    a client has several, and else None. A step is of one pass, or of several where a batch is larger than what a pass
    has place for; `is_last` marks the last one. `counts` are (steps, clients). `places` says which of a
    client's tokens each label of a word is of, `windows` which of its sequences each text's windows are.
    """

    sequences: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    factors: np.ndarray
    num_tokens: np.ndarray
    widths: np.ndarray
    counts: np.ndarray
    tasks: list[str | None]
    is_last: np.ndarray
    places: np.ndarray
    windows: np.ndarray


@dataclass(frozen=True)
class PassSize:
    """The most that a pass has of a client: examples, labels, and sequences, each a window of a text.

    `num_windows` are the most of a text; 0 where every text is one sequence.
    """

    num_examples: int
    num_labels: int
    num_sequences: int
    num_windows: int


def plan_steps(
    members: Sequence[Member],
    store: TokenStore,
    settings: LocalSettings,
    round_number: int,
    size: PassSize,
) -> Iterator[StackPlan]:
    """Yield what every client does in each step, some steps at a time; those with fewer steps rest at the end."""
    planned = [
        planned_steps(member.shards, settings, member.seed, round_number)
        if member.lots is None
        else iter(member.lots.steps)
        for member in members
    ]
    counts = [num_steps(member.shards, settings) for member in members]
    rates = {count: _rates(count, settings, round_number) for count in set(counts)}
    ages = [_Ages(member.optimizer.age, dict(member.optimizer.head_ages)) for member in members]
    first, many = 0, FIRST_STEPS
    while first < max(counts):
        steps = [list(islice(each, many)) for each in planned]
        yield _plan(
            members,
            steps,
            [rates[count][first : first + many] for count in counts],
            ages,
            store,
            settings,
            size,
        )
        first, many = first + many, STEPS


@dataclass
class _Ages:
    """How many steps a client's encoder and heads have made so far."""

    encoder: int
    heads: dict[str, int]

    def after(self, tasks: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The number of each of these steps, from 1: of the encoder, and of the head that it moves."""
        encoder = self.encoder + 1.0 + np.arange(len(tasks))
        head = np.empty(len(tasks))
        for number, task in enumerate(tasks):
            head[number] = self.heads[task] = self.heads.get(task, 0) + 1
        self.encoder += len(tasks)
        return encoder, head


def _plan(
    members: Sequence[Member],
    planned: Sequence[Sequence[Step]],
    rates: Sequence[np.ndarray],
    ages: Sequence[_Ages],
    store: TokenStore,
    settings: LocalSettings,
    most: PassSize,
) -> StackPlan:
    num_steps, parts, size = max(map(len, planned)), num_parts(members), most.num_examples
    counts = np.zeros((num_steps, len(members)), np.int64)
    for k, steps in enumerate(planned):
        counts[: len(steps), k] = [len(batch) for _, batch in steps]
    passes = np.maximum(1, -(-counts.max(1) // size))
    ends = np.cumsum(passes)
    step_of = np.repeat(np.arange(num_steps), passes)
    shape = (len(step_of), len(members), most.num_labels)
    is_by_word = any(task.kind_of.by_word for task in members[0].tasks)
    places = np.zeros(shape if is_by_word else (*shape[:2], 0), np.int32)
    sequences = np.full((*shape[:2], most.num_sequences), NOTHING, np.int64)
    windows = np.full((*shape[:2], parts * size if most.num_windows else 0, most.num_windows), NOWHERE, np.int32)
    # Where there is no example its vector is that of any sequence, and counts nothing.
    windows[..., :1] = 0
    labels, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    factors = np.ones((len(step_of), FACTORS, len(members)))
    factors[:, 0] = -1.0
    for k, (member, steps) in enumerate(zip(members, planned, strict=True)):
        pieces = [piece for (_, batch), count in zip(steps, passes, strict=False) for piece in _cut(batch, count)]
        tasks = [steps[number][0] for number in step_of[: len(pieces)]]
        for task in member.tasks:
            at = np.asarray([number for number, name in enumerate(tasks) if name == task.name], np.int64)
            if not len(at):
                continue
            shard = member.shards[task.name]
            balance = task.kind_of.class_weights(task, shard.labels[shard.indices])
            sizes = np.asarray([len(pieces[number]) for number in at])
            examples = np.concatenate([pieces[number] for number in at])
            row = np.repeat(at, sizes)
            column = np.arange(len(examples)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            if most.num_windows:
                texts = _texts(shard, store, examples, row, column, size)
                _place_windows(texts, sequences[:, k], windows[:, k])
            else:
                found = store.sequences(shard.tokens, examples)
                for part in range(found.shape[1]):
                    sequences[row, k, part * size + column] = found[:, part]
            if is_by_word:
                owners, of_words, tokens = _words(shard, examples, sizes)
                row = row[owners]
                column = np.arange(len(row)) - np.searchsorted(row, row)
                places[row, k, column] = tokens
                labels[row, k, column], weights[row, k, column] = of_words, 1.0
            else:
                batch_labels = shard.labels[examples]
                labels[row, k, column] = batch_labels
                weights[row, k, column] = 1.0 if balance is None else balance[batch_labels]
            factors[at, 0, k] = rates[k][step_of[at]] * settings.learning_rates[task.name]
            expected = 1.0 if member.lots is None else member.lots.expected[task.name]
            factors[at, 3, k] = settings.loss_weights[task.name] / expected
        numbers = ages[k].after([task for task, _ in steps])
        for factor, number in zip((1, 4), numbers, strict=True):
            of_passes = number[step_of[: len(pieces)]]
            factors[: len(pieces), factor, k] = 1.0 - settings.betas[0] ** of_passes
            factors[: len(pieces), factor + 1, k] = np.sqrt(1.0 - settings.betas[1] ** of_passes)
    lengths = store.host_lengths[sequences]
    num_tokens = lengths.sum(-1).max(-1)
    longest = max(planned, key=len)
    step_tasks: list[str | None] = [
        longest[step][0] if len(members[0].tasks) > 1 else None for step in step_of.tolist()
    ]
    is_last = np.zeros(len(step_of), bool)
    is_last[ends - 1] = True
    # Batches differ much in what they have.
    differ = bool(most.num_windows) or any(member.lots is not None for member in members)
    return StackPlan(
        sequences,
        labels,
        weights,
        factors,
        _coarse(num_tokens, most.num_sequences) if differ else -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE,
        _widths(lengths.max((1, 2))),
        counts,
        step_tasks,
        is_last,
        places,
        windows,
    )


@dataclass(frozen=True)
class _Texts:
    """Texts of some passes: the pass, the index in it, the first of its sequences, and how many it has."""

    rows: np.ndarray
    slots: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray


def _texts(
    shard: Shard, store: TokenStore, examples: np.ndarray, row: np.ndarray, column: np.ndarray, size: int
) -> _Texts:
    """The texts of examples at these columns of passes; a pass has second texts behind all first ones."""
    found = []
    for number, (part, begin) in enumerate(
        zip(open_tokens(shard.tokens).parts, store.begins[shard.tokens], strict=True)
    ):
        assert part.cuts is not None, "texts of a run with windows are cut"
        counts = part.cuts.lengths()[examples]
        found.append((row, column + number * size, begin + part.cuts.offsets[examples], counts))
    rows, slots, firsts, counts = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.lexsort((slots, rows))
    return _Texts(rows[order], slots[order], firsts[order], counts[order])


def _place_windows(texts: _Texts, sequences: np.ndarray, windows: np.ndarray) -> None:
    """Put every text's windows end to end into the sequences of its pass, and note which they are."""
    owners = np.repeat(np.arange(len(texts.counts)), texts.counts)
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(texts.counts) - texts.counts, texts.counts)
    rows = texts.rows[owners]
    at = np.arange(len(rows)) - np.searchsorted(rows, rows)
    sequences[rows, at] = texts.firsts[owners] + rank
    windows[rows, texts.slots[owners], rank] = at


def most_windows(members: Sequence[Member], num_examples: int) -> tuple[int, int]:
    """The most sequences of so many examples of one client, rounded up, and of a text; (0, 0) without windows."""
    most, of_text = 0, 0
    for member in members:
        for shard in member.shards.values():
            cuts = [part.cuts for part in open_tokens(shard.tokens).parts if part.cuts is not None]
            if cuts and len(shard):
                counts = np.stack([each.lengths()[shard.indices] for each in cuts])
                most = max(most, int(np.sort(counts.sum(0))[-num_examples:].sum()))
                of_text = max(of_text, int(counts.max()))
    if not most:
        return 0, 0
    # Clients differ, and a stack serves those that are alike.
    multiple = max(SEQUENCE_MULTIPLE, 1 << most.bit_length() >> 3)
    return -(-most // multiple) * multiple, 1 << (of_text - 1).bit_length()


def _words(shard: Shard, examples: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the words in batches of these `sizes`: their examples, labels, and tokens from the first of their batch."""
    tokens = open_tokens(shard.tokens)
    words, lengths = tokens.words, tokens.parts[0].lengths_of(examples)
    assert words is not None, "tokens of a task on words have them marked"
    columns = words[examples]
    is_there = columns.values >= 0
    owners = columns.owners()[is_there]
    starts = np.cumsum(lengths) - lengths
    starts -= np.repeat(starts[np.cumsum(sizes) - sizes], sizes)
    return owners, shard.labels[examples].values[is_there], starts[owners] + columns.values[is_there]


def most_labels(members: Sequence[Member], settings: LocalSettings) -> int:
    """The most labels of a batch for the words of the examples with the most, rounded up; 0 where texts have labels."""
    most = 0
    for member in members:
        for name, shard in member.shards.items():
            words = open_tokens(shard.tokens).words
            if words is not None and len(shard):
                numbers = np.sort(words[shard.indices].lengths())
                most = max(most, int(numbers[-settings.batch_size_of(name, len(shard)) :].sum()))
    return -(-most // LABEL_MULTIPLE) * LABEL_MULTIPLE


def _cut(batch: np.ndarray, count: int) -> list[np.ndarray]:
    return [batch] if count == 1 else np.array_split(batch, count)


def _coarse(num_tokens: np.ndarray, num_sequences: int) -> np.ndarray:
    """More than the sequences, and rounded up by an eighth at most: lots differ, and each shape is recorded."""
    more = np.maximum(num_tokens, num_sequences + 1)
    multiple = np.maximum(TOKEN_MULTIPLE, 2 ** np.floor(np.log2(more)).astype(np.int64) // 8)
    rounded: np.ndarray = -(-more // multiple) * multiple
    return rounded


def num_parts(members: Sequence[Member]) -> int:
    """The most sequences of an example."""
    return 2 if any(task.is_dual for member in members for task in member.tasks) else 1


def _rates(count: int, settings: LocalSettings, round_number: int) -> np.ndarray:
    """What the rate is multiplied by, step by step."""
    done = (np.arange(count) / max(1, count)).tolist()
    return np.asarray([rate_factor(settings, round_number - 1 + part) for part in done])


def _widths(longest: np.ndarray) -> np.ndarray:
    """The longest sequence of each step rounded up to a power of two, from 128 on to a multiple of 64."""
    powers = 2 ** np.ceil(np.log2(np.maximum(longest, 16))).astype(np.int64)
    return np.where(longest <= 128, powers, -(-longest // 64) * 64)


def folders(members: Sequence[Member]) -> tuple[Path, ...]:
    return tuple(sorted({shard.tokens for member in members for shard in member.shards.values()}))
