import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.federation.wire.codecs import (
    block_length,
    check,
    decode,
    encode,
    from_half,
    from_int8,
    largest_indices,
    to_half,
    to_int8,
)

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 300))
SIZES = st.sampled_from([0.0, 1e-30, 1e-12, 1e-5, 1.0, 1e9, 1e34])


def noise(shape: tuple[int, ...], size: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * size


def test_int8_worked_by_hand():
    # The largest of a block is 127, so its scale is 1, which needs no rounding; 0.4 -> 0, 1.5 -> 2 (ties to even).
    values = torch.tensor([127.0, 0.4, 1.5, -63.6] + [0.0] * 4)
    scales, codes = to_int8(values, 4)
    assert codes.tolist() == [127, 0, 2, -64, 0, 0, 0, 0]
    # 1.0 is 0x3f800000
    assert scales.tolist() == [0x3F80, 0]
    assert from_int8(scales, codes, 4).tolist() == [127.0, 0.0, 2.0, -64.0, 0.0, 0.0, 0.0, 0.0]


@given(SHAPES, SIZES)
def test_int8_is_off_by_half_a_step_at_most(shape, size):
    values = noise(shape, size)
    block = block_length(shape)
    back = decode(encode(values, "int8"))
    flat, error = values.reshape(-1), (back - values).abs().reshape(-1)
    for start in range(0, len(flat), block):
        # a scale is rounded up by one part in 128 at most
        half_step = float(flat[start : start + block].abs().max()) / 127 / 2 * (1 + 2**-7)
        assert float(error[start : start + block].max()) <= half_step * 1.0001 + 1e-28


def test_int8_of_a_row_does_not_depend_on_the_rows_around_it():
    table = noise((9, 312), 1.0)
    assert block_length((9, 312)) == 104
    whole, part = decode(encode(table, "int8")), decode(encode(table[[2, 5]], "int8"))
    assert torch.equal(whole[[2, 5]], part)


def test_fp16_has_eleven_bits_whatever_the_size():
    for size in (1e-20, 1e-6, 1.0, 1e20):
        values = noise((4, 50), size)
        large = values.abs() > values.abs().max() / 1000
        error = ((decode(encode(values, "fp16")) - values).abs() / values.abs())[large]
        assert float(error.max()) <= 2**-11
    exponent, halves = to_half(torch.tensor([3.0, -0.5]))
    # 3 is below 2**2, so it is multiplied by 2**13
    assert (exponent, halves.tolist()) == (13, [24576.0, -4096.0])
    assert from_half(exponent, halves).tolist() == [3.0, -0.5]


def test_topk_sends_the_largest_and_nothing_else():
    values = torch.tensor([[0.5, -4.0, 0.0], [2.0, -2.0, 1.0]])
    assert decode(encode(values, "topk", 0.5)).tolist() == [[0.0, -4.0, 0.0], [2.0, -2.0, 0.0]]
    # of the equal 2 and -2 the first
    assert decode(encode(values, "topk", 0.3)).tolist() == [[0.0, -4.0, 0.0], [2.0, 0.0, 0.0]]
    assert largest_indices(torch.zeros(5), 2).tolist() == [0, 1]


@given(SHAPES, SIZES, st.sampled_from(["fp32", "fp16", "int8", "topk"]))
def test_what_is_encoded_passes_its_own_check(shape, size, codec):
    for values in (noise(shape, size), noise(shape, size).double(), noise(shape, size)[0]):
        coded = encode(values, codec, 0.1)
        check(coded)
        back = decode(coded)
        assert (back.shape, back.dtype) == (values.shape, values.dtype)
        assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk"])
def test_vectors_and_whole_numbers_stay_exact(codec):
    for values in (noise((300,), 1.0), torch.arange(12).view(3, 4), torch.tensor(1.5), torch.zeros(0, 3)):
        assert torch.equal(decode(encode(values, codec, 0.1)), values)


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_not_encoded(codec, bad):
    values = torch.ones(2, 64)
    values[1, 3] = bad
    with pytest.raises(ValueError, match="not numbers"):
        encode(values, codec, 0.1)


def test_sizes():
    values = noise((1000, 128), 1e-3)
    sizes = {codec: len(encode(values, codec, 0.05).data) for codec in ("fp32", "fp16", "int8", "topk")}
    # int8: a head, 1000 scales of two bytes; topk: 6400 values of two bytes, and a byte or so for each place
    assert sizes["fp32"] == 512_000
    assert sizes["fp16"] == 256_008
    assert sizes["int8"] == 8 + 2000 + 128_000
    assert 24 + 3 * 6400 <= sizes["topk"] < 24 + 3.1 * 6400
    assert isinstance(encode(values, "int8").data, np.ndarray)
