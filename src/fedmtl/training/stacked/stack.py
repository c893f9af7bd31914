"""A stack: the buffers of several clients, and one training step of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl.capabilities import stacked_methods
from fedmtl.model.bert.layout import WORDS
from fedmtl.model.bert.stacked import Leaf, Ops, PlainOps, StackedBatch, stacked_vectors
from fedmtl.model.bert.stacked_per_example import ExampleRecords
from fedmtl.model.multitask import ACTIVATIONS, MultiTaskModel, pair_features, undecayed
from fedmtl.model.per_example import Clip
from fedmtl.model.windows import LEAF, learns_windows, pool_windows
from fedmtl.sharing.plan import HEADS
from fedmtl.training.local_method import LocalSettings
from fedmtl.training.optimizer import SLOTS
from fedmtl.training.stacked.blocks import Block, Rates, make_block, squares, step_block
from fedmtl.training.stacked.method import StackedMethod
from fedmtl.training.stacked.plan import FACTORS
from fedmtl.training.stacked.shape import StackShape
from fedmtl.training.stacked.store import TokenStore, stacked_batch

# How far the seed moves in a step: no two dropouts of two steps have the same.
SEEDS = 1 << 16


@dataclass(frozen=True)
class Inputs:
    """What differs between steps, where the step finds it: buffers that are filled before each."""

    sequences: Tensor
    labels: Tensor
    weights: Tensor
    factors: Tensor
    losses: Tensor
    places: Tensor
    windows: Tensor


class Stack:
    def __init__(
        self,
        shape: StackShape,
        model: MultiTaskModel,
        settings: LocalSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert model.layout is not None
        master = torch.promote_types(dtype, torch.float32)
        self.shape, self.model, self.settings, self.layout = shape, model, settings, model.layout
        self.tasks = {task: model.tasks[task] for task, _ in shape.head_rows}
        plain = undecayed(model)
        canonical = model.canonical()

        def block(
            names: Sequence[str], clients: slice, factor: float, kind: torch.dtype, taken: torch.dtype = master
        ) -> Block:
            shapes = {name: tuple(getattr(*canonical[name]).shape) for name in names}
            if model.table in shapes:
                shapes[model.table] = (shape.num_rows, *shapes[model.table][1:])
            decays = {
                name: settings.weight_decay if name in shape.trained and name not in plain else 0.0 for name in names
            }
            used = 0 if settings.optimizer == "sgd" and not settings.momentum else len(SLOTS[settings.optimizer])
            return make_block(shapes, clients, decays, factor, used, kind, device, master, taken)

        self.methods: list[StackedMethod] = stacked_methods(settings.methods)
        self.clip = _clip(self.methods, dtype)
        every = slice(0, shape.num_clients)
        unused = (HEADS,) if shape.pool == "pooler" else (HEADS, "pooler.")
        names = [name for name in canonical if name != model.table and not name.startswith(unused)]
        # Apart, so that the weights of a layer's queries, keys and values are neighbours, and their biases too.
        matrices = [name for name in names if name not in plain]
        vectors = sorted((name for name in names if name in plain), key=lambda name: name.endswith(".bias"))
        self.table = block([model.table], every, 1.0, dtype)
        # A product's gradient is as exact as what is multiplied; a sum's is exact, and so is one of several passes.
        self.matrices = block(matrices, every, 1.0, dtype, dtype if self.clip is None else master)
        self.vectors = block(vectors, every, 1.0, dtype)
        self.heads = {
            task: block([f"{HEADS}{task}.{leaf}" for leaf in self._head_leaves(task)], rows, settings.head_rate, master)
            for task, rows in shape.head_rows
        }
        self._moves_all_rows = any(method.moves_all_rows for method in self.methods)
        self.trained = set(shape.trained)
        self.lazy = self._lazy_rows()
        self.blocks = [self.table, self.matrices, self.vectors, *self.heads.values()]
        # A product for several layers finds the gradients of all, also of one that is fixed.
        self._fixed_neighbours = [name for name in names if ".attention.self." in name and name not in self.trained]
        self._leaves: dict[tuple[str, ...], Leaf] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # Memory that the device writes to without waiting; getting it is slow, so that it is used again.
        self._host: dict[int, Tensor] = {}
        rows, size = shape.num_clients, shape.num_labels
        is_by_word = shape.pool == WORDS
        self.inputs = Inputs(
            torch.zeros(rows, shape.num_sequences, dtype=torch.int64, device=device),
            torch.zeros(rows, size, dtype=master, device=device),
            torch.zeros(rows, size, dtype=master, device=device),
            torch.zeros(FACTORS, rows, dtype=master, device=device),
            torch.zeros(rows, dtype=master, device=device),
            torch.zeros(rows, size if is_by_word else 0, dtype=torch.int64, device=device),
            torch.zeros(rows, self._num_texts(), shape.num_windows, dtype=torch.int64, device=device),
        )
        self.index = torch.zeros(rows, model.vocabulary_size, dtype=torch.int64, device=device)
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        for method in self.methods:
            method.allocate(self)

    def step(self, store: TokenStore, num_tokens: int, width: int, task: str | None = None) -> None:
        """Make one step of every client from `inputs`, and write the losses there.

        Where a client has several tasks, the step is of one of them.
        """
        heads = [(name, rows) for name, rows in self.shape.head_rows if task in (None, name)]
        losses, ids = self._losses(store, num_tokens, width, heads)
        self.inputs.losses.copy_(losses.detach())
        total = (losses * self.inputs.factors[3]).sum()
        wanted = [leaf for leaf in self._leaves.values() if leaf.value.requires_grad]
        found = torch.autograd.grad(total, [*(leaf.value for leaf in wanted), self._anchor], allow_unused=True)
        for leaf, gradient in zip(wanted, found, strict=False):
            if gradient is not None and leaf.gradient is not None:
                leaf.gradient.copy_(gradient)
        for name in self._fixed_neighbours:
            block = self._block_of(name)
            block.joined(block.gradients, (name,)).zero_()
        self._move([self.heads[name] for name, _ in heads])
        if self.lazy is None and self.model.table in self.trained:
            if self._moves_all_rows:
                self.table.gradients.zero_()
            else:
                # Rows that no text of the batch uses were never written.
                self._rows_of(self.table.gradients).index_fill_(0, ids, 0.0)
        self.seed.add_(SEEDS)

    def clear(self) -> None:
        """Forget what passes have added to gradients and losses."""
        for block in self.blocks:
            block.gradients.zero_()
        self.inputs.losses.zero_()

    def add_examples(self, store: TokenStore, num_tokens: int, width: int, task: str | None = None) -> None:
        """Add the gradients of the examples of `inputs`, each clipped by itself, and their losses, to those so far.

        A sum of a client is multiplied by its loss's weight in `inputs`; one without a learning rate adds nothing.
        """
        assert self.clip is not None
        heads = [(name, rows) for name, rows in self.shape.head_rows if task in (None, name)]
        batch, ids = self._batch(store, num_tokens, width)
        size = self.inputs.labels.shape[1]
        records = ExampleRecords(batch, size, self._anchor, self.trained, self.model.table)
        words = self._rows_of(self.table.computed).index_select(0, ids).view(*batch.ids.shape, -1)
        losses = self._example_losses(batch, words, heads, records)
        torch.autograd.grad(losses.sum(), [self._anchor], allow_unused=True)
        is_active = (self.inputs.factors[0] >= 0).to(losses.dtype)
        scales = (self.inputs.factors[3] * is_active).unsqueeze(1)
        factors = (self.clip.factors(records.squares()) * scales).to(losses.dtype)
        records.add(factors, self._gradients)
        self.inputs.losses.add_(losses.detach().sum(1) * is_active)
        self.seed.add_(SEEDS)

    def move(self, task: str | None = None) -> None:
        """Make the optimizer's step of every client from the gradients so far."""
        self._move([self.heads[name] for name, _ in self.shape.head_rows if task in (None, name)])

    def moved(self) -> list[Tensor]:
        """How far the values of every block are from where they began, on the host."""
        if self.lazy is not None:
            self.lazy.finish()
        found = []
        for number, block in enumerate(self.blocks):
            if not block.values.is_cuda:
                found.append(block.values - block.before)
                continue
            if number not in self._host:
                self._host[number] = torch.empty(block.values.shape, pin_memory=True)
            found.append(self._host[number].copy_(block.values - block.before, non_blocking=True))
        if self.seed.is_cuda:
            torch.cuda.synchronize(self.seed.device)
        return found

    def slots(self) -> list[list[Tensor]]:
        """Return what the optimizer of every block knows, on the host; call it after `moved`."""
        return [[slot.cpu() for slot in block.slots] for block in self.blocks]

    def blocks_of(self, client: int) -> Iterator[tuple[int, Block, int]]:
        """The blocks that have a client's values: their number, themselves, and its row in them."""
        for number, block in enumerate(self.blocks):
            if block.clients.start <= client < block.clients.stop:
                yield number, block, client - block.clients.start

    def _losses(
        self, store: TokenStore, num_tokens: int, width: int, heads: Sequence[tuple[str, slice]]
    ) -> tuple[Tensor, Tensor]:
        batch, ids = self._batch(store, num_tokens, width)
        words = self._words(ids).view(*batch.ids.shape, -1)
        losses = self._example_losses(batch, words, heads)
        return losses.sum(1) / self.inputs.weights.sum(1).clamp(min=1e-12), ids

    def _batch(self, store: TokenStore, num_tokens: int, width: int) -> tuple[StackedBatch, Tensor]:
        """The batch of `inputs`, and which row each token is in all clients' tables end to end."""
        batch = stacked_batch(store, self.index, self.shape.num_rows, self.inputs.sequences, num_tokens, width)
        clients = torch.arange(len(batch.ids), device=batch.ids.device)
        return batch, (batch.ids + clients[:, None] * self.shape.num_rows).view(-1)

    def _example_losses(
        self,
        batch: StackedBatch,
        words: Tensor,
        heads: Sequence[tuple[str, slice]],
        records: ExampleRecords | None = None,
    ) -> Tensor:
        """Every example's loss times its weight, (clients, examples); `words` are the embeddings of every token."""
        ops, pool = self._ops(batch, words, records), self.shape.pool
        vectors = stacked_vectors(ops, self.layout, batch, pool, words, self.inputs.places)
        parts = [self._task_losses(task, rows, vectors[rows], records) for task, rows in heads]
        return torch.cat(parts) * self.inputs.weights

    def _words(self, ids: Tensor) -> Tensor:
        table = self._rows_of(self.table.computed)
        if self.model.table not in self.trained:
            return table.index_select(0, ids)
        take: Callable[[Tensor], object] = partial(_add_rows, self._rows_of(self.table.gradients), ids)
        if self.lazy is not None:
            self.lazy.open(ids)
            take = self.lazy.take
        found: Tensor = _Lookup.apply(self._anchor, table, ids, take)  # type: ignore[no-untyped-call]
        return found

    def _task_losses(self, name: str, rows: slice, vectors: Tensor, records: ExampleRecords | None) -> Tensor:
        """Return the losses of one task as (clients, examples or words)."""
        task = self.tasks[name]
        leaves = {part: self.leaf((f"{HEADS}{name}.{part}",)).value for part in self._head_leaves(name)}
        weight, bias = leaves["weight"], leaves["bias"]
        features = vectors.to(weight.dtype)
        if task.windows is not None and not task.kind_of.by_word:
            features = pool_windows(features, self.inputs.windows[rows], task.windows.pool, leaves.get(LEAF))
        size = self.inputs.labels.shape[1]
        # Beside tasks of two texts, one of a single text leaves the sequences of the second empty.
        features = pair_features(*features.chunk(2, 1)) if task.is_dual else features[:, :size]
        if task.dropout:
            features = F.dropout(features, task.dropout)
        if task.head is not None:
            into, offset = leaves["hidden.weight"], leaves["hidden.bias"]
            inner = torch.baddbmm(offset.unsqueeze(1), features, into.transpose(1, 2))
            if records is not None:
                inner = records.linear((f"{HEADS}{name}.hidden",), features, inner, rows)
            features = ACTIVATIONS[task.head.activation](inner)
            features = F.dropout(features, task.head.dropout) if task.head.dropout else features
        outputs = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
        if records is not None:
            outputs = records.linear((f"{HEADS}{name}",), features, outputs, rows)
        for method in self.methods:
            outputs = method.adjust(name, outputs)
        labels = self.inputs.labels[rows].reshape(-1)
        labels = labels.long() if task.kind_of.has_labels else labels
        return task.kind_of.losses(task, outputs.flatten(0, 1), labels).view(len(features), -1)

    def _head_leaves(self, task: str) -> tuple[str, ...]:
        """Return how the values of a task's head are called."""
        hidden = () if self.tasks[task].head is None else ("hidden.weight", "hidden.bias")
        return ("weight", "bias", *hidden, *((LEAF,) if learns_windows(self.tasks[task]) else ()))

    def _num_texts(self) -> int:
        """How many texts a pass has of a client, where texts have windows."""
        parts = 2 if any(task.is_dual for task in self.tasks.values()) else 1
        return parts * self.shape.num_examples if self.shape.num_windows else 0

    def _move(self, heads: Sequence[Block]) -> None:
        every = [self.table, self.matrices, self.vectors, *heads]
        moved = [block for block in every if self._moves(block) and not (self.lazy and block is self.table)]
        for method in self.methods:
            method.gradient(moved)
        rate, first, second, _, head_first, head_second = self.inputs.factors
        clip = torch.ones_like(rate)
        if self.settings.max_grad_norm > 0 and self.clip is None:
            square = squares(moved, len(rate)) + (self.lazy.squares() if self.lazy else 0.0)
            clip = (self.settings.max_grad_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        rates = Rates(rate, first, second, clip)
        of_heads = Rates(rate, head_first, head_second, clip)
        for block in moved:
            step_block(block, of_heads if any(block is head for head in heads) else rates, self.settings)
        if self.lazy is not None:
            self.lazy.step(rates)

    def _moves(self, block: Block) -> bool:
        return any(name in self.trained for name in block.spans)

    def _lazy_rows(self) -> Any:
        """The table's rows where a step may touch few of them: by the kernels, for an optimizer that they know."""
        settings, values = self.settings, self.table.values
        is_known = settings.optimizer == "adamw" and not self._moves_all_rows and values.dtype == torch.float32
        kernels = lazy_kernels() if values.is_cuda and is_known and self.model.table in self.trained else None
        return None if kernels is None else kernels(self.table, self.shape.num_rows, self.shape.num_steps, settings)

    def _rows_of(self, buffer: Tensor) -> Tensor:
        """Return the clients' token tables end to end."""
        _, shape = self.table.spans[self.model.table]
        return buffer.view(-1, shape[1])

    def leaf(self, names: tuple[str, ...]) -> Leaf:
        """The values of these names, which are neighbours in their block, as what gradients are taken of."""
        if names not in self._leaves:
            block = self._block_of(names[0])
            value = block.joined(block.computed, names).detach()
            is_trained = any(name in self.trained for name in names) and self.clip is None
            gradient = block.joined(block.gradients, names) if is_trained else None
            self._leaves[names] = Leaf(value.requires_grad_(is_trained), gradient)
        return self._leaves[names]

    def _gradients(self, names: tuple[str, ...]) -> Tensor:
        block = self._block_of(names[0])
        return block.joined(block.gradients, names)

    def _block_of(self, name: str) -> Block:
        return next(block for block in self.blocks if name in block.spans)

    def _ops(self, batch: StackedBatch, words: Tensor, records: ExampleRecords | None) -> Ops:
        fused = fused_ops() if words.is_cuda and words.dtype == torch.bfloat16 else None
        is_known = records is None or not self.layout.hidden_dropout
        if fused is None or batch.width > fused.LONGEST or not is_known:
            return PlainOps(self.leaf, self.layout, batch, records)
        ops: Ops = fused.FusedOps(self.leaf, self.layout, batch, self.seed, records)
        return ops


def _clip(methods: Sequence[StackedMethod], dtype: torch.dtype) -> Clip | None:
    """To what every example's gradient is clipped, where a method says so."""
    bounds = [method.max_example_norm for method in methods if method.max_example_norm is not None]
    assert len(bounds) <= 1, "two methods clip every example's gradient"
    return Clip(bounds[0], dtype=dtype) if bounds else None


@cache
def fused_ops() -> Any:
    """The module of kernels, or None where Triton is missing."""
    try:
        return import_module("fedmtl.model.bert.triton_ops")
    except ImportError:
        return None


@cache
def lazy_kernels() -> Any:
    """LazyRows, or None where Triton is missing."""
    try:
        return import_module("fedmtl.training.stacked.triton_adamw").LazyRows
    except ImportError:
        return None


class _Lookup(torch.autograd.Function):
    """Rows of a table whose gradients go to whoever takes them: a batch uses few of many rows."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: Tensor, ids: Tensor, take: Callable[[Tensor], object]) -> Tensor:
        ctx.take = take
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.take(gradient)
        return None, None, None, None


def _add_rows(total: Tensor, ids: Tensor, gradient: Tensor) -> None:
    # index_put_ sums in a fixed order, where index_add_ does not.
    total.index_put_((ids,), gradient.to(total.dtype), accumulate=True)
