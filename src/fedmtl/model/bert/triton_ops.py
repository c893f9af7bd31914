"""The parts of a stacked BERT as few large kernels, which write gradients of values straight into their tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fedmtl.model.bert import triton_kernels as kernels
from fedmtl.model.bert.layout import BertLayout
from fedmtl.model.bert.stacked import (
    POSITIONS,
    SEGMENTS,
    Leaf,
    Leaves,
    Recorder,
    StackedBatch,
    chosen_rows,
)

# Longer sequences do not fit into one program.
LONGEST = 128
CHUNK = 64


class FusedOps:
    """`seed` is a number on the device from which every dropout of the step is drawn.

    A `recorder` knows nothing of what is dropped after a norm: with one, the layout drops no hidden states.
    """

    def __init__(
        self, leaves: Leaves, layout: BertLayout, batch: StackedBatch, seed: Tensor, recorder: Recorder | None = None
    ) -> None:
        assert recorder is None or not layout.hidden_dropout
        self._leaves, self._layout, self._batch, self._seed = leaves, layout, batch, seed
        self._recorder = recorder
        self._starts = batch.global_starts().view(-1)
        self._lengths = batch.lengths.reshape(-1)
        self._sites = 0

    def embed(self, words: Tensor) -> Tensor:
        positions, segments = (self._leaves((name,)) for name in (POSITIONS, SEGMENTS))
        used = min(self._batch.width, positions.value.shape[1])
        chosen = chosen_rows(self._batch, used, segments.value.shape[1], words.dtype)
        summed = _Embed.apply(words, chosen, positions.value, segments.value, positions, segments)
        summed = summed if self._recorder is None else self._recorder.tables(summed)
        return self._norm("embeddings.LayerNorm", summed, None, None)

    def attend(self, layer: str, hidden: Tensor) -> Tensor:
        names = tuple(f"{layer}.{part}" for part in ("query", "key", "value"))
        bias = self._bias(*names)
        found: Tensor = _Attend.apply(self._product(hidden, *names), bias.value, bias, self)
        return found

    def firsts(self, hidden: Tensor) -> Tensor:
        return hidden.flatten(0, 1).index_select(0, self._starts).view(len(hidden), -1, hidden.shape[-1])

    def attend_firsts(self, layer: str, first: Tensor, hidden: Tensor) -> Tensor:
        names = (f"{layer}.key", f"{layer}.value")
        asking_bias, bias = self._bias(f"{layer}.query"), self._bias(*names)
        asking, joined = self._product(first, f"{layer}.query"), self._product(hidden, *names)
        found: Tensor = _AttendFirsts.apply(asking, joined, asking_bias.value, bias.value, asking_bias, bias, self)
        return found

    def norm_sum(self, dense: str, norm: str, inputs: Tensor, residual: Tensor) -> Tensor:
        return self._norm(norm, self._product(inputs, dense), self._bias(dense), residual)

    def inner(self, dense: str, inputs: Tensor) -> Tensor:
        bias = self._bias(dense)
        found: Tensor = _Gelu.apply(self._product(inputs, dense), bias.value, bias)
        return found

    def pooled(self, dense: str, inputs: Tensor) -> Tensor:
        return torch.tanh(self._product(inputs, dense) + self._bias(dense).value.unsqueeze(1))

    def _bias(self, *names: str) -> Leaf:
        return self._leaves(tuple(f"{name}.bias" for name in names))

    def _product(self, inputs: Tensor, *names: str) -> Tensor:
        """Linear layers without their bias, side by side; who takes the product adds it."""
        weight = self._leaves(tuple(f"{name}.weight" for name in names))
        found: Tensor = _Product.apply(inputs, weight.value, weight)
        # The gradient of a product without its bias is that of the layer's output.
        return found if self._recorder is None else self._recorder.linear(names, inputs, found)

    def _norm(self, name: str, inputs: Tensor, added: Leaf | None, residual: Tensor | None) -> Tensor:
        weight, bias = (self._leaves((f"{name}.{leaf}",)) for leaf in ("weight", "bias"))
        p = self._layout.hidden_dropout
        drawn = (self._seed, self.next_site(), p, 1 / (1 - p), self._layout.epsilon)
        values = (weight.value, bias.value, bias.value if added is None else added.value)
        leaves = (weight, bias, None if residual is None else added)
        recorded: list[Tensor] = []
        found: Tensor = _Norm.apply(inputs, residual, *values, leaves, drawn, recorded)
        if self._recorder is None:
            return found
        summed, means, scales = recorded

        def normed() -> Tensor:
            return (summed - means.unsqueeze(2)) * scales.unsqueeze(2)

        return self._recorder.norm(name, normed, found)

    def next_site(self) -> int:
        self._sites += 1
        return self._sites

    def attention(self, width: int) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, int]]:
        """What the attention kernels take besides values, and how many programs there are."""
        size, p = width // self._layout.num_heads, self._layout.attention_dropout
        sequences = self._batch.starts.shape[1]
        drawn = (self._seed, self.next_site(), p, 1 / (1 - p))
        given = (self._starts, self._lengths, *drawn, size**-0.5, width, size, sequences)
        block = max(16, triton.next_power_of_2(self._batch.width))
        shape = {"DROP": p > 0, "BLOCK": block, "SIZE": max(16, triton.next_power_of_2(size))}
        warps = {16: 1, 32: 2, 64: 4, 128: 8}[block]
        return given, {**shape, "num_warps": warps}, (len(self._starts), self._layout.num_heads)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, chosen: Tensor, positions: Tensor, segments: Tensor, *leaves: Leaf) -> Tensor:
        width = chosen.shape[2] - segments.shape[1]
        ctx.save_for_backward(chosen)
        ctx.leaves, ctx.width = leaves, width
        return torch.baddbmm(words, chosen, torch.cat([positions[:, :width], segments], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        [chosen] = ctx.saved_tensors
        positions, segments = ctx.leaves
        if positions.gradient is None and segments.gradient is None:
            return gradient, None, None, None, None, None
        moved = torch.bmm(chosen.transpose(1, 2), gradient)
        if positions.gradient is not None:
            positions.gradient[:, : ctx.width].copy_(moved[:, : ctx.width])
            positions.gradient[:, ctx.width :].zero_()
        if segments.gradient is not None:
            segments.gradient.copy_(moved[:, ctx.width :])
        return gradient, None, None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, leaf: Leaf) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.leaf = leaf
        return torch.bmm(inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        if ctx.leaf.gradient is not None:
            torch.bmm(gradient.transpose(1, 2), inputs, out=ctx.leaf.gradient)
        return torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None, None, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor, leaf: Leaf) -> Tensor:
        out = torch.empty_like(inputs)
        grid, shape = _programs(*inputs.shape, split=True)
        kernels.gelu_forward[grid](inputs, bias, bias.stride(0), out, *inputs.shape[1:], **shape)
        ctx.save_for_backward(inputs, bias)
        ctx.leaf = leaf
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inputs, bias = ctx.saved_tensors
        clients, num_rows, width = inputs.shape
        grid, shape = _programs(clients, num_rows, width, split=True, summing=True)
        back = torch.empty_like(inputs)
        total = inputs.new_empty(clients, grid[0], width, dtype=torch.float32)
        kernels.gelu_backward[grid](
            inputs, bias, bias.stride(0), gradient.contiguous(), back, total, num_rows, width, **shape
        )
        _put(ctx.leaf, total)
        return back, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, added: Tensor, *rest: Any
    ) -> Tensor:
        clients, num_rows, width = inputs.shape
        leaves, (seed, *drawn, epsilon), recorded = rest
        assert weight.stride(0) == bias.stride(0) == added.stride(0), "they are rows of one buffer"
        out = torch.empty_like(inputs)
        summed = inputs if residual is None else torch.empty_like(inputs)
        means, scales = inputs.new_empty(2, clients, num_rows, dtype=torch.float32)
        grid, shape = _programs(clients, num_rows, width)
        shape |= {"HAS_SUM": residual is not None, "DROP": drawn[1] > 0}
        kernels.norm_forward[grid](
            inputs, added, inputs if residual is None else residual, out, summed, means, scales, weight, bias,
            weight.stride(0), seed, *drawn, epsilon, num_rows, width, **shape,
        )  # fmt: skip
        ctx.save_for_backward(summed, means, scales, weight, seed)
        ctx.leaves, ctx.drawn = leaves, drawn
        ctx.has_sum = residual is not None
        recorded += (summed, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        summed, means, scales, weight, seed = ctx.saved_tensors
        clients, num_rows, width = summed.shape
        grid, shape = _programs(clients, num_rows, width, summing=True)
        has_sum = ctx.has_sum
        shape |= {"HAS_SUM": has_sum, "DROP": ctx.drawn[1] > 0}
        back = torch.empty_like(summed)
        to_residual = torch.empty_like(summed) if has_sum else back
        totals = means.new_empty(3, clients, grid[0], width)
        kernels.norm_backward[grid](
            gradient.contiguous(), summed, means, scales, weight, weight.stride(0), back, to_residual, *totals, seed,
            *ctx.drawn, num_rows, width, **shape,
        )  # fmt: skip
        for leaf, total in zip(ctx.leaves, totals, strict=True):
            _put(leaf, total)
        return back, to_residual if has_sum else None, *(None,) * 6


def _put(leaf: Leaf | None, total: Tensor) -> None:
    """A gradient from the shares that programs found of it."""
    if leaf is not None and leaf.gradient is not None:
        torch.sum(total, 1, out=leaf.gradient)


def _programs(
    clients: int, num_rows: int, width: int, *, split: bool = False, summing: bool = False
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Programs by client, and by columns where those may be `split`; the rows and columns each takes at a time.

    One that is `summing` takes more rows, as far as there are enough programs left to keep a GPU busy.
    """
    block = triton.next_power_of_2(width)
    block = min(block, 256) if split else block
    rows = max(1, min(16, 4096 // block))
    chunk = max(rows, min(CHUNK, triton.next_power_of_2(clients * num_rows // 2048 + 1))) if summing else rows
    grid = (triton.cdiv(num_rows, chunk), clients, triton.cdiv(width, block))
    return grid, {"CHUNK": chunk, "ROWS": rows, "BLOCK": block, "num_warps": 4}


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, bias: Tensor, leaf: Leaf, ops: FusedOps) -> Tensor:
        clients, num_tokens, width = joined.shape
        given, shape, grid = ops.attention(width // 3)
        # Tokens after the last sequence stay zero, so that they are numbers.
        out = joined.new_zeros(clients, num_tokens, width // 3)
        kernels.attend_forward[grid](joined, bias, bias.stride(0), out, *given, **shape)
        ctx.save_for_backward(joined, bias)
        ctx.leaf, ctx.launch = leaf, (given, shape, grid)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        joined, bias = ctx.saved_tensors
        given, shape, grid = ctx.launch
        back = torch.zeros_like(joined)
        kernels.attend_backward[grid](joined, bias, bias.stride(0), gradient.contiguous(), back, *given, **shape)
        _sum_rows(ctx.leaf, back)
        return back, None, None, None


class _AttendFirsts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asking: Tensor, joined: Tensor, asking_bias: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        *leaves, ops = rest
        given, shape, grid = ops.attention(asking.shape[-1])
        out = torch.empty_like(asking)
        values = (asking, asking_bias, asking_bias.stride(0), joined, bias, bias.stride(0))
        kernels.firsts_forward[grid](*values, out, *given, **shape)
        ctx.save_for_backward(asking, joined, asking_bias, bias)
        ctx.leaves, ctx.launch = leaves, (given, shape, grid)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        asking, joined, asking_bias, bias = ctx.saved_tensors
        given, shape, grid = ctx.launch
        back_asking, back = torch.empty_like(asking), torch.zeros_like(joined)
        values = (asking, asking_bias, asking_bias.stride(0), joined, bias, bias.stride(0))
        kernels.firsts_backward[grid](*values, gradient.contiguous(), back_asking, back, *given, **shape)
        for leaf, moved in zip(ctx.leaves, (back_asking, back), strict=True):
            _sum_rows(leaf, moved)
        return back_asking, back, *(None,) * 5


def _sum_rows(leaf: Leaf, moved: Tensor) -> None:
    if leaf.gradient is not None:
        torch.sum(moved, 1, dtype=leaf.gradient.dtype, out=leaf.gradient)


def linear_squares(
    inputs: Tensor, gradient: Tensor, batch: StackedBatch, num_examples: int, *, bias: bool
) -> tuple[Tensor, Tensor]:
    """Every example's squared norm of the gradient of a linear layer's weight, and of its bias where it counts.

    The second are the aligned squares (`bert/cpu/per_example.py`).

    Inputs and output gradients are (clients, tokens, width); examples have as many sequences as there are parts.
    """
    clients, _, inner = inputs.shape
    sequences, outer = batch.starts.shape[1], gradient.shape[2]
    found, aligned = torch.empty(2, clients, num_examples, dtype=torch.float32, device=inputs.device)
    block = max(16, triton.next_power_of_2(batch.width))
    kernels.linear_squares[(clients * num_examples,)](
        inputs.contiguous(), gradient, batch.global_starts().view(-1), batch.lengths.reshape(-1), found, aligned,
        inner, outer, num_examples, sequences, BIAS=bias, PARTS=sequences // num_examples, BLOCK=block,
        CHUNK=64 if block <= 64 else 32, num_warps=4 if block <= 64 else 8,
    )  # fmt: skip
    return found, aligned


def example_sums(values: Tensor, batch: StackedBatch, num_examples: int) -> Tensor:
    """(clients, tokens, width) -> the sum over every example's tokens, (clients, examples, width)."""
    clients, _, width = values.shape
    sequences, block = batch.starts.shape[1], min(triton.next_power_of_2(width), 256)
    found = torch.empty(clients, num_examples, width, dtype=torch.float32, device=values.device)
    kernels.example_sums[(clients * num_examples, triton.cdiv(width, block))](
        values.contiguous(), batch.global_starts().view(-1), batch.lengths.reshape(-1), found, width, num_examples,
        sequences, PARTS=sequences // num_examples, ROWS=16, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return found
