"""Training several clients at once: what `training.local.train` does, for a stack.

On a GPU the steps are recorded once for each shape of batch as CUDA graphs, and replayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmtl.capabilities import stacked_methods
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import compact_ids
from fedmtl.training.local import num_steps
from fedmtl.training.local_method import LocalSettings
from fedmtl.training.optimizer import SLOTS
from fedmtl.training.stacked.outcomes import Outcome, StepRecords, make_outcomes
from fedmtl.training.stacked.plan import (
    Member,
    PassSize,
    StackPlan,
    folders,
    most_labels,
    most_windows,
    num_parts,
    plan_steps,
)
from fedmtl.training.stacked.shape import StackShape, reached, round_rows
from fedmtl.training.stacked.stack import Stack
from fedmtl.training.stacked.store import TokenStore, open_store

# Before anything is recorded: libraries set themselves up, kernels are compiled.
WARM_STEPS = 2

# Recording the steps of a stack takes seconds; tasks that cannot share one alternate every round.
MOST_STACKS = 4


class Steps:
    """Makes the steps of a stack from its inputs, pass by pass; on a GPU what was recorded is replayed."""

    def __init__(self, stack: Stack, store: TokenStore, device: torch.device) -> None:
        self._stack, self._store, self._device = stack, store, device
        self._is_first = True
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, num_tokens: int, width: int, task: str | None, is_active: np.ndarray | None) -> None:
        """Make a pass; `is_active` says which clients make a step with the last one of a step, and is None before."""
        stack, shape = self._stack, (num_tokens, width, task)
        if stack.clip is None:
            self._make(shape, partial(stack.step, self._store, *shape))
            return
        if self._is_first:
            stack.clear()
        self._make(shape, partial(stack.add_examples, self._store, *shape))
        self._is_first = is_active is not None
        if is_active is not None:
            for method in stack.methods:
                method.add_noise(stack, task, is_active)
            self._make((task,), partial(stack.move, task))

    def _make(self, shape: tuple[object, ...], work: Callable[[], None]) -> None:
        if self._device.type != "cuda":
            work()
            return
        if shape not in self._graphs:
            self._graphs[shape] = self._record(work)
        self._graphs[shape].replay()

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record some work; that needs warm-ups, which must not count."""
        with self._at_rest():
            torch.cuda.synchronize(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_STEPS):
                    work()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        return graph

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """No client has a learning rate meanwhile, and afterwards inputs and gradients are what they were."""
        stack = self._stack
        factors = stack.inputs.factors.clone()
        now = None if stack.lazy is None else stack.lazy.now.clone()
        # Gradients of several passes are there already, and methods change them.
        gradients = [] if stack.clip is None else [block.gradients.clone() for block in stack.blocks]
        stack.inputs.factors[0].fill_(-1.0)
        yield
        stack.inputs.factors.copy_(factors)
        if now is not None:
            stack.lazy.now.copy_(now)
        for block, before in zip(stack.blocks, gradients, strict=False):
            block.gradients.copy_(before)


@dataclass
class Stacks:
    """What is saved between rounds: the tokens on the device, and the last stacks with their recorded steps."""

    model: MultiTaskModel
    device: torch.device
    dtype: torch.dtype
    store: TokenStore | None = None
    made: dict[tuple[StackShape, str], tuple[Stack, Steps]] = field(default_factory=dict)


def train_stack(
    stacks: Stacks,
    members: Sequence[Member],
    weights: Sequence[Mapping[str, Tensor]],
    settings: LocalSettings,
    *,
    round_number: int,
) -> list[Outcome]:
    """Train clients that have a shape in common; `weights` are theirs by canonical name, in the members' order."""
    order = sorted(range(len(members)), key=lambda i: (members[i].tasks[0].name, i))
    ordered = [members[i] for i in order]
    ordered_weights = [weights[i] for i in order]
    store = _store(stacks, ordered)
    stack, step = _stack(stacks, store, _shape(stacks.model, ordered, ordered_weights, settings), settings)
    _load(stack, ordered, ordered_weights)
    for method in stack.methods:
        method.load(stack, ordered)
    seed = derive_seed(ordered[0].seed, "stack", *(str(member.seed) for member in ordered))
    torch.manual_seed(seed)
    stack.seed.fill_(seed % (1 << 40))
    shape = stack.shape
    size = PassSize(shape.num_examples, shape.num_labels, shape.num_sequences, shape.num_windows)
    planned = plan_steps(ordered, store, settings, round_number, size)
    records = _run(stack, step, planned)
    found = make_outcomes(stack, ordered, records, ordered_weights)
    outcomes = dict(zip(order, found, strict=True))
    return [outcomes[i] for i in range(len(members))]


def _store(stacks: Stacks, members: Sequence[Member]) -> TokenStore:
    wanted = folders(members)
    if stacks.store is None or not set(wanted) <= set(stacks.store.begins):
        known = () if stacks.store is None else tuple(stacks.store.begins)
        stacks.made.clear()
        stacks.store = open_store(sorted({*known, *wanted}), stacks.model.pad_id, stacks.device)
    return stacks.store


def _shape(
    model: MultiTaskModel, members: Sequence[Member], weights: Sequence[Mapping[str, Tensor]], settings: LocalSettings
) -> StackShape:
    holders: dict[str, list[int]] = {}
    trained: dict[str, None] = {}
    for k, member in enumerate(members):
        for task in member.tasks:
            holders.setdefault(task.name, []).append(k)
            trained |= dict.fromkeys(reached(model, task.name, member.keys, member.fixed))
    rows = max(len(client_weights[model.table]) for client_weights in weights)
    sizes = (method.most_examples(settings) for method in stacked_methods(settings.methods))
    size = next((size for size in sizes if size is not None), settings.largest_batch)
    num_sequences, num_windows = most_windows(members, size)
    return StackShape(
        len(members),
        min(round_rows(rows), model.vocabulary_size),
        model.pools[members[0].tasks[0].name],
        tuple((task, rows_of_task[0], rows_of_task[-1] + 1) for task, rows_of_task in holders.items()),
        tuple(trained),
        size,
        num_sequences or size * num_parts(members),
        1 << max(num_steps(member.shards, settings) for member in members).bit_length(),
        most_labels(members, settings) or size,
        num_windows,
    )


def _stack(stacks: Stacks, store: TokenStore, shape: StackShape, settings: LocalSettings) -> tuple[Stack, Steps]:
    """Return the stack of this shape; where there are many, the least recently used one is freed."""
    # A loss's weight is an input of a step, and may change every round.
    key = (shape, json.dumps({**settings.to_dict(), "loss_weights": None}))
    if key not in stacks.made:
        while len(stacks.made) >= MOST_STACKS:
            stacks.made.pop(next(iter(stacks.made)))
        stack = Stack(shape, stacks.model, settings, stacks.dtype, stacks.device)
        stacks.made[key] = (stack, Steps(stack, store, stacks.device))
    stacks.made[key] = stacks.made.pop(key)
    return stacks.made[key]


def _load(stack: Stack, members: Sequence[Member], weights: Sequence[Mapping[str, Tensor]]) -> None:
    model = stack.model
    index = torch.empty(stack.index.shape, dtype=torch.int64)
    for k, (member, client_weights) in enumerate(zip(members, weights, strict=True)):
        for _, block, row in stack.blocks_of(k):
            for name in block.spans:
                block.load(block.values, row, name, client_weights[name])
        every = np.arange(model.vocabulary_size)
        mapped = every if member.rows is None else compact_ids(member.rows, model.vocabulary_size)
        # What a client's texts do not use points past its rows; it must not point into another client's.
        index[k] = torch.from_numpy(np.minimum(mapped, stack.shape.num_rows - 1))
    stack.index.copy_(index)
    for block in stack.blocks:
        block.begin()
    for k, member in enumerate(members):
        _load_slots(stack, k, member)
    if stack.lazy is not None:
        stack.lazy.begin()


def _load_slots(stack: Stack, k: int, member: Member) -> None:
    for _, block, row in stack.blocks_of(k):
        for slot, buffer in zip(SLOTS[stack.settings.optimizer], block.slots, strict=False):
            saved = member.optimizer.slots.get(slot, {})
            for name in saved.keys() & block.spans.keys():
                block.load(buffer, row, name, saved[name])


def _run(stack: Stack, step: Steps, plans: Iterable[StackPlan]) -> StepRecords:
    inputs = stack.inputs
    buffers = (inputs.sequences, inputs.labels, inputs.weights, inputs.factors, inputs.places, inputs.windows)
    losses = [inputs.losses.new_zeros(0, len(stack.index))]
    counts = [np.zeros((0, len(stack.index)), np.int64)]
    tasks: list[str | None] = []
    done = 0
    for plan in plans:
        planned = (plan.sequences, plan.labels, plan.weights, plan.factors, plan.places, plan.windows)
        arrays = [_upload(array, stack.index.device) for array in planned]
        step_losses = inputs.losses.new_zeros(len(plan.counts), len(stack.index))
        if stack.lazy is not None:
            stack.lazy.history[done : done + len(step_losses)].copy_(arrays[3][:, :3])
            done += len(step_losses)
        number = 0
        shapes = zip(plan.num_tokens.tolist(), plan.widths.tolist(), plan.tasks, plan.is_last.tolist(), strict=True)
        for row, (num_tokens, width, task, is_last) in enumerate(shapes):
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer.copy_(array[row])
            step(num_tokens, width, task, plan.factors[row, 0] >= 0 if is_last else None)
            if is_last:
                step_losses[number].copy_(inputs.losses)
                tasks.append(task)
                number += 1
        losses.append(step_losses)
        counts.append(plan.counts)
    every, numbers = torch.cat(losses).cpu().numpy(), np.concatenate(counts)
    # Passes add up the losses of examples.
    return StepRecords(every if stack.clip is None else every / np.maximum(numbers, 1), numbers, tasks)


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is busy with."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
