"""What is added up for one example never exceeds the bound, whatever rounding leaves of tokens that nearly cancel.

Rounding is as coarse as what is rounded: of three tokens v, w and -(v + w) nothing is left, but once each is multiplied
by a factor and rounded something is, a share of |v| and not of the bound. And a squared norm that is found from
products between tokens is off by a share of their squares, so that a gradient that is longer than the bound may be
found to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fedmtl.model.bert.cpu.per_example import Owners, Squares, linear_squares, table_squares
from fedmtl.model.bert.stacked import POSITIONS, StackedBatch
from fedmtl.model.bert.stacked_per_example import ExampleRecords
from fedmtl.model.per_example import Clip, ModuleRecords
from model.compiled import compiled

EXAMPLES, TOKENS, INNER, OUTER = 12, 5, 32, 16
# Of a step's factor: a loss's weight over the expected number of examples, no power of two.
BOUND, SCALE = 0.3, 1 / 5


def cancelling(size: float, left: float, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of tokens, (examples, tokens, width): `left` is how much does not cancel."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, 1, INNER, generator=generator).expand(-1, TOKENS, -1)
    gradient = size * torch.randn(EXAMPLES, TOKENS, OUTER, generator=generator)
    gradient[:, -1] = -(1 - left) * gradient[:, :-1].sum(1)
    return inputs.to(dtype).contiguous(), gradient.to(dtype)


def cases(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    for seed, size in enumerate((1e-3, 1.0, 1e2, 1e4, 1e6)):
        for left in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0):
            yield cancelling(size, left, dtype, seed)


def longest(factors: Tensor, write: Callable[[Tensor], list[Tensor]]) -> float:
    """The norm of what is added up for the example for which it is longest, in bounds."""
    found = []
    for example in range(EXAMPLES):
        alone = torch.zeros_like(factors)
        alone[example] = factors[example]
        found.append(torch.stack([part.double().square().sum() for part in write(alone)]).sum().sqrt())
    return float(torch.stack(found).max()) / (BOUND * SCALE)


def by_stack(inputs: Tensor, gradient: Tensor, kind: str) -> tuple[Squares, Callable[[Tensor], list[Tensor]]]:
    dtype, count = inputs.dtype, EXAMPLES * TOKENS
    slots = torch.arange(count).unsqueeze(0)
    rows = slots % TOKENS // 3
    lengths = torch.full((1, EXAMPLES), TOKENS)
    batch = StackedBatch(rows, rows, rows * 0, slots // TOKENS, slots[:, ::TOKENS], lengths, TOKENS)
    anchor = torch.zeros((), requires_grad=True)
    names = {"linear": ("x.weight", "x.bias"), "bias": ("x.bias",), "tables": ("words", POSITIONS)}[kind]
    records = ExampleRecords(batch, EXAMPLES, anchor, set(names), "words")
    output = torch.zeros(1, count, OUTER, dtype=dtype, requires_grad=True)
    noted = records.tables(output) if kind == "tables" else records.linear(("x",), inputs.view(1, count, -1), output)
    torch.autograd.grad((noted * gradient.view(1, count, -1)).sum(), [anchor], allow_unused=True)
    found = records.squares()
    kept = torch.promote_types(dtype, torch.float32)

    def write(factors: Tensor) -> list[Tensor]:
        shapes = {"x.weight": (1, OUTER, INNER), "x.bias": (1, OUTER)}
        into = {name: torch.zeros(shapes.get(name, (1, TOKENS, OUTER)), dtype=kept) for name in names}
        records.add(factors.unsqueeze(0).to(kept), lambda of: into[of[0]])
        return list(into.values())

    return Squares(found.found[0], found.aligned[0]), write


def by_modules(inputs: Tensor, gradient: Tensor, kind: str) -> tuple[Squares, Callable[[Tensor], list[Tensor]]]:
    module: nn.Module = nn.Embedding(TOKENS, OUTER) if kind == "tables" else nn.Linear(INNER, OUTER, dtype=inputs.dtype)
    leaves = {"linear": ("weight", "bias"), "bias": ("bias",), "tables": ("weight",)}[kind]
    records = ModuleRecords({leaf: (module, leaf) for leaf in leaves})
    count = EXAMPLES * TOKENS
    given = torch.arange(count) % TOKENS // 3 if kind == "tables" else inputs.view(count, -1)
    with records.listening(EXAMPLES, EXAMPLES, [torch.arange(count) // TOKENS]):
        output = module(given)
    records.backward((output * gradient.view(count, -1)).sum())

    def write(factors: Tensor) -> list[Tensor]:
        into = {leaf: torch.zeros_like(getattr(module, leaf)).detach() for leaf in leaves}
        records.write(factors, into)
        return list(into.values())

    return records.squares(), write


@pytest.mark.parametrize("kind", ["linear", "bias", "tables"])
@pytest.mark.parametrize("means", ["modules", "stack", "stack in bf16"])
def test_it_does_not_exceed_the_bound(means: str, kind: str) -> None:
    dtype = torch.bfloat16 if means.endswith("bf16") else torch.float32
    made = by_modules if means == "modules" else by_stack
    found = []
    for inputs, gradient in cases(dtype):
        squares, write = made(inputs, gradient, kind)
        found.append(longest(Clip(BOUND, SCALE, dtype).factors(squares), write))
    assert max(found) <= 1
    # What does not cancel is clipped to little less than the bound: the last of each seven cases.
    assert min(found[20::7]) > (0.97 if dtype == torch.bfloat16 else 0.99)


@pytest.mark.parametrize("means", ["modules", "stack", "stack in bf16"])
def test_it_is_as_long_as_its_norm_says_where_nothing_is_clipped(means: str) -> None:
    """Of examples below the bound nothing is taken away for rounding."""
    dtype = torch.bfloat16 if means.endswith("bf16") else torch.float32
    made = by_modules if means == "modules" else by_stack
    squares, _ = made(*cancelling(1e-4, 1e-3, dtype, 0), "linear")
    factors = Clip(BOUND, SCALE, dtype).factors(squares)
    torch.testing.assert_close(factors, torch.full_like(factors, SCALE), rtol=1e-12, atol=0)


def test_aligned_squares_are_of_the_sum_of_the_norms() -> None:
    # Two tokens of one example, (3, 4) with (2, 0) and (0, 1) with (0, 7): norms of 10 and 7. With a bias, an input of
    # norm 5 counts as the root of 26.
    inputs, gradient = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 7.0]])
    owners = Owners.of_tokens(torch.tensor([0, 0]), 1)
    for kernels in (None, compiled(torch.float32)):
        for bias, expected in ((False, 17.0**2), (True, (2 * 26**0.5 + 7 * 2**0.5) ** 2)):
            squares = Squares.of_none(1)
            linear_squares(inputs, gradient, owners, squares, kernels, bias=bias)
            assert squares.aligned.item() == pytest.approx(expected, rel=1e-6)
            # The two are orthogonal: 10^2 + 7^2, and for the bias 2^2 + 7^2.
            assert squares.found.item() == pytest.approx(149 + bias * 53, rel=1e-6)
    # Of two tables: both tokens in row 5 of the first, in rows 0 and 1 of the second. (2 + 7)^2 + 2^2 + 7^2.
    squares = Squares.of_none(1)
    indices = {"a": torch.tensor([5, 5]), "b": torch.tensor([0, 1])}
    table_squares(indices, gradient, owners, ("a", None), squares)
    assert squares.aligned.item() == pytest.approx(81 + 53)
    assert squares.found.item() == pytest.approx(53 + 53)
