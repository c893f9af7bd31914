"""The kernels against torch's own operations; they run where there is a GPU, or under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from fedmtl.model.bert.layout import BertLayout
from fedmtl.model.bert.stacked import Leaf, PlainOps, StackedBatch, stacked_vectors

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")

CLIENTS, SEQUENCES, PLACES, WIDTH, SIZE, LAYERS = 3, 4, 40, 24, 12, 2
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def make_batch() -> StackedBatch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (CLIENTS, SEQUENCES), generator=generator)
    ends = lengths.cumsum(1)
    places = torch.arange(PLACES).expand(CLIENTS, -1).contiguous()
    owners = torch.searchsorted(ends, places, right=True)
    starts = ends - lengths
    positions = (places - starts.gather(1, owners.clamp(max=SEQUENCES - 1))) * (owners < SEQUENCES)
    segments = torch.randint(0, 2, (CLIENTS, PLACES), generator=generator) * (owners < SEQUENCES)
    parts = (places, positions, segments, owners, starts, lengths)
    return StackedBatch(*(part.to(DEVICE) for part in parts), width=16)


class Values:
    """Random values of every name, rounded as the kernels see them, side by side where several are asked for."""

    def __init__(self, dtype: torch.dtype, heads: int = 2) -> None:
        self.generator, self.dtype, self.narrow = torch.Generator().manual_seed(2), dtype, heads * SIZE
        self.known: dict[tuple[str, ...], Leaf] = {}

    def __call__(self, names: tuple[str, ...]) -> Leaf:
        if names not in self.known:
            drawn = torch.randn(CLIENTS, *self.shape(names), generator=self.generator) * 0.2
            if "LayerNorm.weight" in names[0]:
                drawn += 1
            value = drawn.to(DEVICE, DTYPE).to(self.dtype).requires_grad_(True)
            is_product = names[0].endswith("weight") and value.dim() == 3 and "embeddings" not in names[0]
            kept = torch.zeros(value.shape, device=DEVICE, dtype=self.dtype if is_product else torch.float32)
            self.known[names] = Leaf(value, kept)
        return self.known[names]

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        if "position" in names[0] or "token_type" in names[0]:
            return (20 if "position" in names[0] else 2, WIDTH)
        out = 2 * WIDTH if "intermediate" in names[0] else WIDTH
        into = 2 * WIDTH if ".output.dense" in names[0] and "attention" not in names[0] else WIDTH
        if ".self." in names[0]:
            out = self.narrow
        if ".attention.output.dense.weight" in names[0]:
            into = self.narrow
        is_matrix = names[0].endswith("weight") and "LayerNorm" not in names[0]
        return (len(names) * out, into) if is_matrix else (len(names) * out,)


def run(
    kind: str, pool: str, dropout: float = 0.0, seed: int = 5, heads: int = 2
) -> dict[tuple[str, ...], torch.Tensor]:
    """The vectors and all gradients: by the kernels (`fused`), by torch in their dtype (`plain`), or exactly."""
    from fedmtl.model.bert.triton_ops import FusedOps

    dtype = torch.float32 if kind == "exact" else DTYPE
    layout = BertLayout(LAYERS, heads, SIZE, 1e-12, dropout, dropout)
    batch, values = make_batch(), Values(dtype, heads)
    generator = torch.Generator().manual_seed(3)
    words = torch.randn(CLIENTS, PLACES, WIDTH, generator=generator).to(DEVICE, DTYPE).to(dtype).requires_grad_(True)
    weights = torch.randn(CLIENTS, SEQUENCES, WIDTH, generator=generator).to(DEVICE, DTYPE).to(dtype)
    # Values are drawn in the order they are asked for; this makes it the same for both.
    found = stacked_vectors(PlainOps(values, layout, batch), layout, batch, pool, words)
    if kind == "fused":
        ops = FusedOps(values, layout, batch, torch.tensor(seed, device=DEVICE))
        found = stacked_vectors(ops, layout, batch, pool, words)
    leaves = [leaf.value for leaf in values.known.values()]
    gradients = torch.autograd.grad((found * weights).sum(), [words, *leaves], allow_unused=True)
    told = {("vectors",): found.detach(), ("words",): gradients[0]}
    for (names, leaf), gradient in zip(values.known.items(), gradients[1:], strict=True):
        assert leaf.gradient is not None
        told[names] = leaf.gradient if gradient is None else gradient
    return {names: value.float() for names, value in told.items()}


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp(min=1e-3))


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("pool", ["pooler", "cls", "mean"])
def test_the_kernels_are_as_exact_as_torch(pool, heads):
    """Two heads are as wide as the hidden states; one is a head that was left of them."""
    exact, plain, fused = (run(kind, pool, heads=heads) for kind in ("exact", "plain", "fused"))
    for names, value in exact.items():
        # A key's bias has no gradient but rounding.
        if "key.bias" not in names[0]:
            assert distance(fused[names], value) < 2 * distance(plain[names], value) + 1e-4, names


def test_dropout_follows_from_the_seed_alone():
    first, again, other = (run("fused", "cls", 0.4, seed)[("vectors",)] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)
    assert not torch.allclose(first, run("fused", "cls")[("vectors",)], atol=1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="differences need single precision")
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_gradients_with_dropout_are_those_of_the_same_masks(pool, monkeypatch):
    """Moving the words a little changes the sum as their gradient says, only if both ways draw the same masks."""
    from fedmtl.model.bert.triton_ops import FusedOps

    layout = BertLayout(LAYERS, 2, SIZE, 1e-12, 0.3, 0.3)
    batch, values = make_batch(), Values(torch.float32)
    generator = torch.Generator().manual_seed(4)
    words = torch.randn(CLIENTS, PLACES, WIDTH, generator=generator).requires_grad_(True)
    weights = torch.randn(CLIENTS, SEQUENCES, WIDTH, generator=generator)
    direction = torch.randn(words.shape, generator=generator)

    def total(at: torch.Tensor) -> torch.Tensor:
        ops = FusedOps(values, layout, batch, torch.tensor(9))
        return (stacked_vectors(ops, layout, batch, pool, at) * weights).sum()

    [gradient] = torch.autograd.grad(total(words), [words])
    with torch.no_grad():
        measured = (total(words + 1e-3 * direction) - total(words - 1e-3 * direction)) / 2e-3
    assert float((gradient * direction).sum()) == pytest.approx(float(measured), rel=0.01)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_sums_of_examples_are_those_of_torch(parts: int, bias: bool) -> None:
    from fedmtl.model.bert import triton_ops
    from fedmtl.model.bert.stacked_per_example import EVERY, ExampleRecords, _Linear

    batch, generator = make_batch(), torch.Generator().manual_seed(3)
    inputs, gradient = (
        torch.randn(CLIENTS, PLACES, width, generator=generator).to(DEVICE, DTYPE) for width in (WIDTH, 3 * WIDTH)
    )
    number = SEQUENCES // parts
    records = ExampleRecords(batch, number, torch.zeros(()), (), "table")
    exact = _Linear(("layer",), inputs.double(), gradient.double(), bias, EVERY)
    found = triton_ops.linear_squares(inputs, gradient, batch, number, bias=bias)
    for squares, expected in zip(found, records._linear_squares(exact), strict=True):
        torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(
        triton_ops.example_sums(gradient, batch, number).double(),
        records._sums(gradient.double()),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pool", ["pooler", "mean"])
def test_norms_of_a_recorded_pass_are_those_of_torch(pool: str, parts: int) -> None:
    from fedmtl.model.bert.stacked_per_example import ExampleRecords
    from fedmtl.model.bert.triton_ops import FusedOps

    layout, number = BertLayout(LAYERS, 2, SIZE, 1e-12, 0.0, 0.0), SEQUENCES // parts
    drawn = torch.randn(CLIENTS, PLACES, WIDTH, generator=torch.Generator().manual_seed(3))
    norms, sums = {}, {}
    for kind in ("exact", "fused"):
        dtype = torch.float32 if kind == "exact" else DTYPE
        batch, values = make_batch(), Values(dtype)
        words = drawn.to(DEVICE, DTYPE).to(dtype)
        # Values are drawn in the order they are asked for.
        stacked_vectors(PlainOps(values, layout, batch), layout, batch, pool, words)
        trained = {name for names in values.known for name in names}
        anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        records = ExampleRecords(batch, number, anchor, trained, "table")

        def fixed(names: tuple[str, ...], values: Values = values) -> Leaf:
            return Leaf(values(names).value.detach(), None)

        ops = PlainOps(fixed, layout, batch, records)
        if kind == "fused":
            ops = FusedOps(fixed, layout, batch, torch.tensor(5, device=DEVICE), records)
        found = stacked_vectors(ops, layout, batch, pool, words)
        torch.autograd.grad(found.float().square().sum(), [anchor], allow_unused=True)
        squares = records.squares()
        norms[kind] = torch.stack([squares.found, squares.aligned]).sqrt()
        totals = {names: torch.zeros(leaf.value.shape, device=DEVICE) for names, leaf in values.known.items()}
        records.add(torch.full((CLIENTS, number), 0.5, device=DEVICE), totals.__getitem__)
        sums[kind] = totals
    tolerance = 1e-4 if torch.float32 == DTYPE else 0.05
    torch.testing.assert_close(norms["fused"], norms["exact"], rtol=tolerance, atol=0)
    for names, value in sums["exact"].items():
        if "key.bias" not in names[0]:
            assert distance(sums["fused"][names], value) < tolerance, names
