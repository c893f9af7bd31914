"""The packed pass with a gradient for every example: their norms first, then their sum with a factor each.

Ghost clipping with book-keeping (Li et al. 2022, Large language models can be strong differentially private learners;
Bu et al. 2023, Differentially private optimization on large model at small cost): one pass forward and one back through
the activations, in which linear layers remember inputs and output gradients. The squared norm of an example's gradient
of a linear layer is the sum over pairs (s, t) of its tokens of (a_s . a_t) (g_s . g_t), so that no gradient of an
example is ever formed; the weights' gradients are made once, from output gradients times the factors of their examples.

An example may have several rows, such as the two texts of a pair: the tokens of all of them are its tokens.

Sums over tokens are rounded as finely as their terms, not as what is left of them: where the gradients of tokens nearly
cancel, a norm may be off by more than itself. So beside each square goes its *aligned* square: that of the sum of the
terms' norms, as if all of them pointed the same way. What rounding does is a share of that (`Clip` in
`model/per_example.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmtl.model.bert.cpu import encoder
from fedmtl.model.bert.cpu.encoder import PassMemory, Trace, backward, forward, is_reached
from fedmtl.model.bert.cpu.encoder_pass import WORDS, Gradients, Kernels, Normed, Pass, Workspace
from fedmtl.model.bert.layout import BertLayout, MaskSource, Packed

# Buffers of gradients that linear layers may go on to use: each of them is one of its own in this pass.
_LASTING = ("by_inner", "by_joint")


@dataclass(frozen=True)
class Owners:
    """Which example each token is of: `of` by token; the tokens by example, `order` from `starts` on."""

    of: Tensor
    order: Tensor
    starts: Tensor
    num: int
    longest: int

    @staticmethod
    def of_tokens(of: Tensor, num: int) -> Owners:
        counts = torch.bincount(of, minlength=num)
        starts = torch.zeros(num + 1, dtype=torch.int64, device=of.device)
        torch.cumsum(counts, 0, out=starts[1:])
        return Owners(of, torch.argsort(of, stable=True), starts, num, int(counts.max()) if num else 0)

    def pad(self, tokens: Tensor) -> Tensor:
        """(tokens, width) -> (examples, most tokens of one, width), filled up with zeros."""
        padded = tokens.new_zeros((self.num * self.longest, tokens.shape[1]))
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(len(self.order), device=self.of.device)
        slots = self.of * self.longest + rank - self.starts[self.of]
        return padded.index_copy_(0, slots, tokens).view(self.num, self.longest, -1)


@dataclass(frozen=True)
class Squares:
    """Of every example's gradient the squared norm so far, and the aligned one, in double precision."""

    found: Tensor
    aligned: Tensor

    @staticmethod
    def of_none(num: int, device: torch.device | None = None) -> Squares:
        found, aligned = torch.zeros(2, num, dtype=torch.float64, device=device)
        return Squares(found, aligned)

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.found + other.found, self.aligned + other.aligned)


def linear_squares(
    inputs: Tensor, gradient: Tensor, owners: Owners, squares: Squares, kernels: Kernels | None = None, *, bias: bool
) -> None:
    """Add the squared norms of the gradients of a linear layer's weight, and of its bias where it counts."""
    found = squares.found
    norms = torch.linalg.vector_norm(inputs, dim=1).square_().add_(bias).sqrt_()
    norms.mul_(torch.linalg.vector_norm(gradient, dim=1))
    squares.aligned.add_(torch.zeros_like(found).index_add_(0, owners.of, norms.double()).square_())
    inner, outer = inputs.shape[1], gradient.shape[1]
    if kernels is not None and kernels.fits(inner, outer):
        most = owners.longest
        wide = -(-most // 16) * 16
        size = most * (inner + outer) + max(inner * outer, wide * (max(inner, outer) + 2 * most))
        room = torch.empty(size, dtype=inputs.dtype)
        kernels.call(
            "linear_squares", owners.num, outer, inner, owners.order, owners.starts, inputs, gradient, int(bias),
            found, room,
        )  # fmt: skip
        return
    left, right = owners.pad(inputs), owners.pad(gradient)
    if owners.longest * (inner + outer) > 2 * inner * outer:
        found += torch.bmm(right.transpose(1, 2), left).square().sum((1, 2), dtype=torch.float64)
        if bias:
            found += right.sum(1).square().sum(1, dtype=torch.float64)
        return
    products = torch.bmm(left, left.transpose(1, 2)).double()
    found += (products + bias).mul_(torch.bmm(right, right.transpose(1, 2))).sum((1, 2))


def owner_sums(
    gradient: Tensor, owners: Owners, inputs: Tensor | None, moments: Tensor | None, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """Every example's gradient of a layer norm's weight and bias; of inputs and their moments (mean, 1 / deviation).

    Without inputs the first is empty: the second is then that of a linear layer's bias.
    """
    shape = owners.num, gradient.shape[1]
    if kernels is not None:
        by_bias = gradient.new_empty(shape)
        by_weight = gradient.new_empty(shape if inputs is not None else (0,))
        kernels.call("owner_sums", *shape, owners.order, owners.starts, gradient, inputs, moments, by_weight, by_bias)
        return by_weight, by_bias
    by_bias = gradient.new_zeros(shape).index_add_(0, owners.of, gradient)
    if inputs is None or moments is None:
        return gradient.new_empty(0), by_bias
    normed = (inputs - moments[:, :1]) * moments[:, 1:]
    return gradient.new_zeros(shape).index_add_(0, owners.of, gradient * normed), by_bias


def table_squares(
    indices: Mapping[str, Tensor],
    gradient: Tensor,
    owners: Owners,
    padding: tuple[str, int | None],
    squares: Squares,
    kernels: Kernels | None = None,
) -> None:
    """Add those of the gradients of tables whose rows were added up; the `padding` row of the named one has none."""
    found, (words, pad_id) = squares.found, padding
    norms = torch.linalg.vector_norm(gradient, dim=1).double()
    for each in indices.values():
        _add_aligned_rows(each, norms, owners, squares.aligned)
    # The one with a padding row comes first, as the kernel has it.
    of_tables = [indices.get(words), *(index for name, index in indices.items() if name != words)]
    if kernels is not None and kernels.fits(gradient.shape[1]) and len(of_tables) <= 3:
        width, most = gradient.shape[1], owners.longest
        wide = -(-most // 16) * 16
        room = torch.empty(most * width + wide * (width + most), dtype=gradient.dtype)
        of_tables += [None] * (3 - len(of_tables))
        kernels.call(
            "table_squares", owners.num, width, owners.order, owners.starts, *of_tables,
            -1 if pad_id is None else pad_id, gradient, found, room,
        )  # fmt: skip
        return
    padded = owners.pad(gradient)
    grams = torch.bmm(padded, padded.transpose(1, 2)).double()
    for number, index in enumerate(of_tables):
        if index is not None:
            rows = owners.pad(index.unsqueeze(1) + 1).squeeze(2)
            same = (rows.unsqueeze(1) == rows.unsqueeze(2)) & (rows.unsqueeze(1) > 0)
            if number == 0 and pad_id is not None:
                same &= rows.unsqueeze(1) != pad_id + 1
            found += (grams * same).sum((1, 2))


def _add_aligned_rows(index: Tensor, norms: Tensor, owners: Owners, aligned: Tensor) -> None:
    """Add the squares of what every example adds to every row of a table, by the norms of the tokens alone."""
    num_rows = int(index.max()) + 1 if len(index) else 1
    rows, inverse = torch.unique(owners.of * num_rows + index, return_inverse=True)
    sums = norms.new_zeros(len(rows)).index_add_(0, inverse, norms)
    aligned.index_add_(0, rows // num_rows, sums.square_())


@dataclass(frozen=True)
class _Linear:
    """Linear layers with the same inputs; `columns` are those of each one's outputs."""

    columns: Mapping[str, slice]
    inputs: Tensor
    gradient: Tensor
    owners: Owners


@dataclass(frozen=True)
class _Heads:
    """A linear layer in which each head has inputs: (rows, heads, ...)."""

    name: str
    inputs: Tensor
    gradient: Tensor
    totals: Tensor


@dataclass(frozen=True)
class _Summed:
    """A vector of which every example has its gradient: (examples, width)."""

    name: str
    gradients: Tensor


@dataclass(frozen=True)
class _Tables:
    indices: Mapping[str, Tensor]
    gradient: Tensor


@dataclass(frozen=True)
class _RecordingPass(Pass):
    """Remembers what gradients are made of, where another pass writes them."""

    num_examples: int = 0
    records: list[_Linear | _Heads | _Summed | _Tables] = field(default_factory=list)
    lasting: set[int] = field(default_factory=set)
    owners: dict[int, Owners] = field(default_factory=dict)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in _LASTING:
            return super().take(name, *shape)
        buffer = super().take(f"{name}.{len(self.lasting)}", *shape)
        self.lasting.add(buffer.data_ptr())
        return buffer

    def linear_gradients(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        self.joint_gradients([name], inputs, gradient)

    def joint_gradients(self, names: Sequence[str], inputs: Tensor, gradient: Tensor) -> None:
        size = gradient.shape[1] // len(names)
        columns = {name: slice(n * size, (n + 1) * size) for n, name in enumerate(names)}
        with_weight = {name: part for name, part in columns.items() if self.gradients.wants(f"{name}.weight")}
        for name, part in columns.items():
            if name not in with_weight and self.gradients.wants(f"{name}.bias"):
                self._sum(f"{name}.bias", gradient[:, part].contiguous())
        if with_weight:
            if len(with_weight) < len(names):
                gradient = torch.cat([gradient[:, part] for part in with_weight.values()], 1)
                with_weight = {name: slice(n * size, (n + 1) * size) for n, name in enumerate(with_weight)}
            elif gradient.data_ptr() not in self.lasting:
                gradient = self._copy(gradient)
            self.records.append(_Linear(with_weight, inputs, gradient, self._owners(len(inputs))))

    def head_gradients(self, name: str, inputs: Tensor, gradient: Tensor, totals: Tensor) -> None:
        if self.gradients.wants(f"{name}.weight") or self.gradients.wants(f"{name}.bias"):
            self.records.append(_Heads(name, *(part.clone() for part in (inputs, gradient, totals))))

    def writable(self, name: str) -> Tensor:
        return self.take(f"by_{name}", *self.weights[name].shape)

    def made_head_gradients(self, name: str, inputs: Tensor, gradient: Tensor, totals: Tensor) -> None:
        self.head_gradients(name, inputs, gradient, totals)

    def norm_gradients(self, normed: Normed, gradient: Tensor, parts: Sequence[Tensor | None]) -> None:
        names = f"{normed.name}.weight", f"{normed.name}.bias"
        if any(map(self.gradients.wants, names)):
            moments = normed.moments[0] if self.kernels else torch.cat(normed.moments, 1)
            sums = owner_sums(gradient, self._owners(len(gradient)), normed.inputs, moments, self.kernels)
            made = (_Summed(name, each) for name, each in zip(names, sums, strict=True))
            self.records.extend(one for one in made if self.gradients.wants(one.name))

    def table_gradients(self, indices: Mapping[str, Tensor], gradient: Tensor) -> None:
        wanted = {name: index for name, index in indices.items() if self.gradients.wants(name)}
        if wanted:
            self.records.append(_Tables(wanted, self._copy(gradient)))

    def squares(self) -> Squares:
        """The squared norm of every example's gradient."""
        squares = Squares.of_none(self.num_examples)
        for record in self.records:
            if isinstance(record, _Linear):
                self._add_linear_squares(record, squares)
            elif isinstance(record, _Heads):
                self._add_head_squares(record, squares)
            elif isinstance(record, _Summed):
                squares.found.add_(record.gradients.double().square().sum(1))
            else:
                owners = self._owners(len(record.gradient))
                table_squares(record.indices, record.gradient, owners, self._padding(), squares, self.kernels)
        return squares

    def write(self, factors: Tensor) -> None:
        """Write the sum of all examples' gradients, each times its factor; records are used up."""
        by_token = factors.index_select(0, self._owners(len(self.batch.ids)).of).unsqueeze(1)
        by_row = factors.repeat(self.batch.num_rows // self.num_examples).unsqueeze(1)
        for record in self.records:
            if isinstance(record, _Linear):
                scale = by_token if len(record.gradient) == len(by_token) else by_row
                record.gradient.mul_(scale)
                if len(record.columns) == 1:
                    super().linear_gradients(next(iter(record.columns)), record.inputs, record.gradient)
                else:
                    super().joint_gradients(list(record.columns), record.inputs, record.gradient)
            elif isinstance(record, _Heads):
                scaled = record.gradient.mul_(by_row.unsqueeze(2))
                super().head_gradients(record.name, record.inputs, scaled, record.totals)
            elif isinstance(record, _Summed):
                torch.mv(record.gradients.t(), factors, out=self.gradients.into(record.name))
            else:
                super().table_gradients(record.indices, record.gradient.mul_(by_token))

    def _add_linear_squares(self, record: _Linear, squares: Squares) -> None:
        has_bias = {name: self.gradients.wants(f"{name}.bias") for name in record.columns}
        if len(set(has_bias.values())) == 1:
            alike = {next(iter(has_bias.values())): record.gradient}
        else:
            columns = record.columns.items()
            alike = {
                one: torch.cat([record.gradient[:, part] for name, part in columns if has_bias[name] is one], 1)
                for one in (True, False)
            }
        for with_bias, gradient in alike.items():
            linear_squares(record.inputs, gradient, record.owners, squares, self.kernels, bias=with_bias)

    def _add_head_squares(self, record: _Heads, squares: Squares) -> None:
        """Rows of one example are few: one for each of its texts."""

        def grams(part: Tensor) -> Tensor:
            by_example = part.view(-1, self.num_examples, *part.shape[1:]).permute(1, 2, 0, 3)
            return torch.matmul(by_example, by_example.transpose(2, 3)).double()

        left, right = grams(record.inputs), grams(record.gradient)
        weight, bias = (self.gradients.wants(f"{record.name}.{leaf}") for leaf in ("weight", "bias"))
        both = left * weight + grams(record.totals) * bias
        squares.found.add_((both * right).sum((1, 2, 3)))
        seen, back = (part.diagonal(dim1=2, dim2=3).clamp(min=0.0) for part in (both, right))
        squares.aligned.add_((seen * back).sqrt().sum(2).square().sum(1))

    def _sum(self, name: str, gradient: Tensor) -> None:
        _, sums = owner_sums(gradient, self._owners(len(gradient)), None, None, self.kernels)
        self.records.append(_Summed(name, sums))

    def _copy(self, gradient: Tensor) -> Tensor:
        return super().take(f"recorded.{len(self.records)}", *gradient.shape).copy_(gradient)

    def _owners(self, count: int) -> Owners:
        """Whose the tokens are, or the rows, of which there are `count`."""
        if count not in self.owners:
            rows = torch.arange(self.batch.num_rows) % self.num_examples
            is_of_rows = count == self.batch.num_rows
            of = rows if is_of_rows else rows.index_select(0, self.batch.slots // self.batch.width)
            self.owners[count] = Owners.of_tokens(of, self.num_examples)
        return self.owners[count]

    def _padding(self) -> tuple[str, int | None]:
        return WORDS, self.padding


class ExamplePass:
    """One pass over some examples: `vectors` come out, then their gradients go in, then a factor for each example."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layout: BertLayout,
        batch: Packed,
        pool: str,
        masks: MaskSource,
        padding: int | None,
        memory: PassMemory,
        num_examples: int,
    ) -> None:
        wanted = {name: value for name, value in weights.items() if value.requires_grad and is_reached(name, pool)}
        self._memory, self._pool = memory, pool
        self._space = memory.spaces.pop() if memory.spaces else Workspace()
        weights = {name: value.detach() for name, value in weights.items()}
        compiled = encoder.kernels(weights["embeddings.LayerNorm.weight"].dtype)
        self._gradients: dict[str, Tensor] = {}
        self._run = _RecordingPass(
            weights, layout, batch, masks, padding, self._space, Gradients(wanted, self._gradients), True, compiled,
            num_examples,
        )  # fmt: skip
        with torch.no_grad():
            self._trace: Trace | None = forward(self._run, pool)
        self.vectors = self._trace.vectors.clone()

    @torch.no_grad()
    def squares(self, gradient: Tensor) -> Squares:
        """The squared norm of every example's gradient of the encoder, from the gradients of the vectors."""
        assert self._trace is not None, "a pass is followed back once"
        backward(self._run, self._pool, self._trace, gradient.contiguous())
        self._trace = None
        return self._run.squares()

    @torch.no_grad()
    def write(self, factors: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Write the sum of the examples' gradients, each times its factor, over the tensors of these names."""
        self._gradients.update(targets)
        self._run.write(factors)
        self._memory.spaces.append(self._space)
