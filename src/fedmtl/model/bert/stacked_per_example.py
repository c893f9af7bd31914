"""Gradients of every example of stacked clients: their norms first, then their sums with a factor each.

Ghost clipping with book-keeping, as `bert/cpu/per_example.py` has it, with a client axis in front. The parts of the
computation (`bert/stacked.py`) and the heads say what linear layers, norms and tables were given; the backward pass
goes through activations alone and leaves the gradient of each of their outputs here. Norms follow from both without a
gradient of any example, and the sums are one product for each layer, of output gradients times the factors.

An example may have several sequences, such as the two texts of a pair: the tokens of all of them are its tokens. The
aligned squares beside the norms are those of `bert/cpu/per_example.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedmtl.model.bert.cpu.per_example import Squares
from fedmtl.model.bert.stacked import POSITIONS, SEGMENTS, StackedBatch, chosen_rows

# The names of values that are neighbours in the clients' gradients -> those, to add to.
Targets = Callable[[tuple[str, ...]], Tensor]
EVERY = slice(None)


class _Noted(torch.autograd.Function):
    """The same values, whose gradient is noted; the anchor makes autograd come here whatever else takes gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, note: Callable[[Tensor], object]) -> Tensor:
        ctx.note = note
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(gradient)
        return gradient, None, None


@dataclass(frozen=True)
class _Linear:
    """Some layers with the same inputs, side by side, of which weights are trained, or biases, or both."""

    names: tuple[str, ...]
    inputs: Tensor
    gradient: Tensor
    has_bias: bool
    clients: slice


@dataclass(frozen=True)
class _Summed:
    """A vector of which every example has its gradient: (clients, examples, width)."""

    names: tuple[str, ...]
    gradients: Tensor
    clients: slice


@dataclass(frozen=True)
class _Tables:
    names: tuple[str, ...]
    gradient: Tensor


class ExampleRecords:
    """What one pass leaves of it. `trained` are the names of values that take gradients, `table` the token table's.

    A batch has the sequences of all examples' first texts, then of all second ones. A linear layer is given tokens,
    sequences or examples: there are more tokens than sequences.
    """

    def __init__(
        self, batch: StackedBatch, num_examples: int, anchor: Tensor, trained: Collection[str], table: str
    ) -> None:
        self._batch, self._num, self._anchor, self._trained, self._table = batch, num_examples, anchor, trained, table
        self._num_sequences = batch.starts.shape[1]
        self._parts = self._num_sequences // num_examples
        assert batch.ids.shape[1] > self._num_sequences, "tokens and sequences are distinguished by their number"
        self._records: list[_Linear | _Summed | _Tables] = []

    # What the parts of the computation say.

    def linear(self, names: tuple[str, ...], inputs: Tensor, output: Tensor, clients: slice = EVERY) -> Tensor:
        if not any(f"{name}.{leaf}" in self._trained for name in names for leaf in ("weight", "bias")):
            return output
        inputs = inputs.detach()

        def note(gradient: Tensor) -> None:
            self._records.extend(self._of_linear(names, inputs, gradient.contiguous(), clients))

        return self._note(output, note)

    def norm(self, name: str, normed: Callable[[], Tensor], output: Tensor) -> Tensor:
        wanted = [leaf for leaf in ("weight", "bias") if f"{name}.{leaf}" in self._trained]
        if not wanted:
            return output

        def note(gradient: Tensor) -> None:
            for leaf in wanted:
                each = gradient * normed() if leaf == "weight" else gradient
                self._records.append(_Summed((f"{name}.{leaf}",), self._sums(each), EVERY))

        return self._note(output, note)

    def tables(self, output: Tensor) -> Tensor:
        names = tuple(name for name in (self._table, POSITIONS, SEGMENTS) if name in self._trained)
        return self._note(output, lambda g: self._records.append(_Tables(names, g.contiguous()))) if names else output

    # What came of it.

    @torch.no_grad()
    def squares(self) -> Squares:
        """The squared norm of every example's gradient, and the aligned one: (clients, examples)."""
        shape = len(self._batch.ids), self._num
        found, aligned = torch.zeros(2, *shape, dtype=torch.float64, device=self._batch.ids.device)
        for record in self._records:
            if isinstance(record, _Linear):
                squares, terms = self._linear_squares(record)
                found[record.clients] += squares
                aligned[record.clients] += terms
            elif isinstance(record, _Summed):
                found[record.clients] += record.gradients.to(found.dtype).square().sum(2)
            else:
                squares, terms = self._table_squares(record)
                found += squares
                aligned += terms
        return Squares(found, aligned)

    @torch.no_grad()
    def add(self, factors: Tensor, targets: Targets) -> None:
        """Add all examples' gradients, each times its factor (clients, examples), to the clients' gradients."""
        for record in self._records:
            if isinstance(record, _Summed):
                own = factors[record.clients].to(record.gradients.dtype)
                total = torch.bmm(own.unsqueeze(1), record.gradients).squeeze(1)
                targets(record.names).add_(total)
            elif isinstance(record, _Linear):
                self._add_linear(record, factors[record.clients], targets)
            else:
                self._add_tables(record, factors, targets)

    def _note(self, output: Tensor, note: Callable[[Tensor], object]) -> Tensor:
        noted: Tensor = _Noted.apply(output, self._anchor, note)  # type: ignore[no-untyped-call]
        return noted

    def _of_linear(
        self, names: tuple[str, ...], inputs: Tensor, gradient: Tensor, clients: slice
    ) -> Iterator[_Linear | _Summed]:
        """Neighbours of which the same is trained are one record."""
        size = gradient.shape[2] // len(names)

        def kind(number: int) -> tuple[bool, bool]:
            return f"{names[number]}.weight" in self._trained, f"{names[number]}.bias" in self._trained

        for (has_weight, has_bias), numbers in groupby(range(len(names)), kind):
            first, *others = numbers
            last = others[-1] if others else first
            own, part = names[first : last + 1], gradient
            if len(own) < len(names):
                part = gradient[..., first * size : (last + 1) * size].contiguous()
            if has_weight:
                yield _Linear(own, inputs, part, has_bias, clients)
            elif has_bias:
                yield _Summed(tuple(f"{name}.bias" for name in own), self._sums(part), clients)

    def _linear_squares(self, record: _Linear) -> tuple[Tensor, Tensor]:
        inputs, gradient = record.inputs, record.gradient
        is_of_tokens = inputs.shape[1] == self._batch.ids.shape[1]
        kernels = example_kernels() if is_of_tokens and gradient.is_cuda and gradient.dtype == torch.bfloat16 else None
        if kernels is not None and self._batch.width <= kernels.LONGEST:
            squares: tuple[Tensor, Tensor] = kernels.linear_squares(
                inputs, gradient, self._batch, self._num, bias=record.has_bias
            )
            return squares
        left, right = self._padded(inputs), self._padded(gradient, is_masked=True)
        exact = _exact(gradient.dtype)
        inner, outer, longest = inputs.shape[2], gradient.shape[2], left.shape[1]
        if longest * (inner + outer) > 2 * inner * outer:
            found = _product(right.transpose(1, 2), left).to(exact).square().sum((1, 2))
            if record.has_bias:
                found = found + right.sum(1, dtype=exact).square().sum(1)
        else:
            both = _product(left, left.transpose(1, 2)).to(exact) + record.has_bias
            found = (both * _product(right, right.transpose(1, 2))).sum((1, 2))
        seen, given = (torch.linalg.vector_norm(each, dim=2, dtype=exact) for each in (left, right))
        terms = (seen.square_().add_(record.has_bias).sqrt_() * given).sum(1).square()
        return found.view(-1, self._num), terms.view(-1, self._num)

    def _table_squares(self, record: _Tables) -> tuple[Tensor, Tensor]:
        """A row's gradient is the sum over the tokens that use it."""
        gradient = self._padded(record.gradient, is_masked=True)
        same = torch.zeros((), device=gradient.device)
        for index in self._indices(record.names):
            rows = self._padded(index.unsqueeze(2)).squeeze(2)
            same = same + (rows.unsqueeze(1) == rows.unsqueeze(2))
        exact = _exact(gradient.dtype)
        grams = _product(gradient, gradient.transpose(1, 2)).to(exact)
        norms = torch.linalg.vector_norm(gradient, dim=2, dtype=exact)
        aligned = norms.unsqueeze(1) * norms.unsqueeze(2)
        squares, of_rows = ((each * same).sum((1, 2)).view(-1, self._num) for each in (grams, aligned))
        return squares, of_rows

    def _add_linear(self, record: _Linear, factors: Tensor, targets: Targets) -> None:
        by_row = self._of_rows(factors, record.gradient.shape[1])
        scaled = record.gradient * by_row.to(record.gradient.dtype).unsqueeze(2)
        targets(tuple(f"{name}.weight" for name in record.names)).add_(_product(scaled.transpose(1, 2), record.inputs))
        if record.has_bias:
            kind = torch.promote_types(scaled.dtype, torch.float32)
            targets(tuple(f"{name}.bias" for name in record.names)).add_(scaled.sum(1, dtype=kind))

    def _add_tables(self, record: _Tables, factors: Tensor, targets: Targets) -> None:
        by_token = self._of_rows(factors, record.gradient.shape[1])
        scaled = record.gradient * by_token.to(record.gradient.dtype).unsqueeze(2)
        if self._table in record.names:
            target = targets((self._table,))
            clients = torch.arange(len(target), device=target.device)
            rows = (self._batch.ids + clients[:, None] * target.shape[1]).view(-1)
            # index_put_ sums in a fixed order, where index_add_ does not.
            added = scaled.flatten(0, 1).to(target.dtype)
            target.view(-1, target.shape[2]).index_put_((rows,), added, accumulate=True)
        if POSITIONS in record.names or SEGMENTS in record.names:
            num_positions, num_segments = self._batch.width, 2
            chosen = chosen_rows(self._batch, num_positions, num_segments, scaled.dtype)
            total = _product(chosen.transpose(1, 2), scaled)
            if POSITIONS in record.names:
                target = targets((POSITIONS,))
                used = min(num_positions, target.shape[1])
                target[:, :used].add_(total[:, :used])
            if SEGMENTS in record.names:
                target = targets((SEGMENTS,))
                used = min(num_segments, target.shape[1])
                target[:, :used].add_(total[:, num_positions : num_positions + used])

    def _indices(self, names: Sequence[str]) -> Iterator[Tensor]:
        of = {self._table: self._batch.ids, POSITIONS: self._batch.positions, SEGMENTS: self._batch.segments}
        yield from (of[name] for name in names)

    def _sums(self, each: Tensor) -> Tensor:
        """(clients, tokens, sequences or examples, width) -> every example's sum, (clients, examples, width)."""
        if each.shape[1] == self._num:
            return each if each.dtype != torch.bfloat16 else each.float()
        if each.shape[1] == self._num_sequences:
            kind = torch.promote_types(each.dtype, torch.float32)
            return each.view(len(each), self._parts, self._num, -1).sum(1, dtype=kind)
        kernels = example_kernels() if each.is_cuda and each.dtype != torch.float64 else None
        if kernels is not None:
            summed: Tensor = kernels.example_sums(each, self._batch, self._num)
            return summed
        return _product(self._belongs.to(each.dtype), each)

    def _padded(self, rows: Tensor, *, is_masked: bool = False) -> Tensor:
        """(clients, tokens, sequences or examples, width) -> (clients * examples, most rows of one, width)."""
        width = rows.shape[2]
        if rows.shape[1] == self._num:
            return rows.reshape(-1, 1, width)
        if rows.shape[1] == self._num_sequences:
            return rows.view(len(rows), self._parts, self._num, width).transpose(1, 2).reshape(-1, self._parts, width)
        picked = rows.flatten(0, 1).index_select(0, self._sources).view(-1, self._parts * self._batch.width, width)
        return picked * self._real.to(picked.dtype) if is_masked else picked

    def _of_rows(self, factors: Tensor, count: int) -> Tensor:
        """The factors of the examples that tokens, sequences or examples are of, and 0 for padding."""
        if count == self._num:
            return factors
        of_sequences = factors.repeat(1, self._parts)
        if count == self._num_sequences:
            return of_sequences
        return torch.cat([of_sequences, factors.new_zeros(len(factors), 1)], 1).gather(1, self._batch.owners)

    @cached_property
    def _columns(self) -> Tensor:
        return torch.arange(self._batch.width, device=self._batch.ids.device)

    @cached_property
    def _real(self) -> Tensor:
        inside = self._columns < self._batch.lengths[..., None]
        return self._by_example(inside).view(-1, self._parts * self._batch.width, 1)

    @cached_property
    def _sources(self) -> Tensor:
        """Which token fills each padded one; padding is filled with a sequence's first."""
        inside = self._columns < self._batch.lengths[..., None]
        return self._by_example(self._batch.global_starts()[..., None] + self._columns * inside).reshape(-1)

    @cached_property
    def _belongs(self) -> Tensor:
        examples = torch.arange(self._num, device=self._batch.ids.device)
        owners = self._batch.owners[:, None]
        return (owners % self._num == examples[:, None]) & (owners < self._num_sequences)

    def _by_example(self, values: Tensor) -> Tensor:
        """(clients, sequences, width) with the sequences of each example side by side."""
        return values.view(len(values), self._parts, self._num, -1).transpose(1, 2).reshape(len(values), self._num, -1)


def _exact(kind: torch.dtype) -> torch.dtype:
    """What squares are summed in: where products are exact to 24 bits, their differences need more."""
    return torch.float32 if kind == torch.bfloat16 else torch.float64


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product that is not rounded to bf16."""
    if left.dtype != torch.bfloat16:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


@cache
def example_kernels() -> Any:
    """The module with kernels for norms and sums of examples, or None where Triton is missing."""
    try:
        return import_module("fedmtl.model.bert.triton_ops")
    except ImportError:
        return None
