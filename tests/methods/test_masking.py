"""Shares, keys, masks and whole numbers: what the sums of secure aggregation are made of."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import chi2

from fedmtl.methods.masking import (
    CHUNK,
    NUMBER_STEP,
    PRIME,
    SECRET_BYTES,
    WEIGHT_BITS,
    FixedPoint,
    add_masks,
    agree,
    decode_numbers,
    encode_numbers,
    is_share,
    join,
    new_secret,
    public_key,
    quantized,
    recover,
    seal,
    split,
    unseal,
    weight_unit,
)


def test_the_modulus_is_the_first_prime_above_every_secret():
    def is_prime(number: int) -> bool:
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1

        def passes(base: int) -> bool:
            power = pow(base, odd, number)
            return power in (1, number - 1) or any(pow(power, 2**i, number) == number - 1 for i in range(1, twos))

        return all(passes(base) for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))

    assert is_prime(PRIME)
    assert not any(is_prime(number) for number in range(2**256, PRIME))


@pytest.mark.parametrize("seed", range(8))
def test_any_threshold_of_shares_gives_the_secret_and_one_fewer_does_not(seed):
    chance = random.Random(seed)
    num_shares = chance.randint(1, 12)
    threshold = chance.randint(1, num_shares)
    secret = chance.choice([chance.randbytes(SECRET_BYTES), bytes(SECRET_BYTES), b"\xff" * SECRET_BYTES])
    shares = dict(enumerate(split(secret, threshold, num_shares), start=1))
    assert all(map(is_share, shares.values()))
    chosen = chance.sample(sorted(shares), threshold)
    assert join({point: shares[point] for point in chosen}) == secret
    if threshold > 1:
        assert join({point: shares[point] for point in chosen[1:]}) != secret


def test_fewer_shares_fit_every_secret():
    """With two of three needed, one share and any secret lie on a line: the share says nothing."""
    (share, *_) = split(b"\x07" * SECRET_BYTES, 2, 3)
    for other in (bytes(SECRET_BYTES), b"\xaa" * SECRET_BYTES):
        slope = (int.from_bytes(share, "big") - int.from_bytes(other, "big")) % PRIME
        second = (int.from_bytes(other, "big") + 2 * slope) % PRIME
        assert join({1: share, 2: second.to_bytes(33, "big")}) == other


def test_a_wrong_share_is_left_out_where_there_is_one_to_spare():
    secret = new_secret()
    shares = dict(enumerate(split(secret, 3, 5), start=1))
    wrong = {**shares, 2: new_secret().rjust(33, b"\0")}
    assert recover(wrong, 3, lambda found: found == secret) == secret
    assert recover({1: shares[1], 2: wrong[2], 3: shares[3]}, 3, lambda found: found == secret) is None
    assert recover({1: shares[1]}, 3, lambda found: True) is None


@pytest.mark.parametrize("value", [b"", b"\0" * 32, "x", PRIME.to_bytes(33, "big")])
def test_what_is_no_share_is_recognised(value):
    assert not is_share(value)


def test_both_sides_find_the_same_key_and_another_purpose_another_one():
    mine, theirs = new_secret(), new_secret()
    assert agree(mine, public_key(theirs), "mask", 1) == agree(theirs, public_key(mine), "mask", 1)
    assert agree(mine, public_key(theirs), "mask", 1) != agree(mine, public_key(theirs), "mask", 2)
    # Where words end is part of what is derived.
    assert agree(mine, public_key(theirs), "ab", "c") != agree(mine, public_key(theirs), "a", "bc")
    with pytest.raises(ValueError):
        agree(mine, bytes(32), "mask")


def test_a_sealed_text_opens_with_its_key_and_its_words_alone():
    key = new_secret()
    sealed = seal(key, b"share", "a", "b")
    assert unseal(key, sealed, "a", "b") == b"share"
    assert unseal(key, sealed, "b", "a") is None
    assert unseal(new_secret(), sealed, "a", "b") is None
    assert unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), "a", "b") is None
    assert unseal(key, b"", "a", "b") is None


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_mask_cancels_exactly_and_looks_like_chance(dtype):
    key, length = new_secret(), CHUNK // 4 + 1000
    plain = np.arange(length, dtype=dtype)
    masked = plain.copy()
    add_masks(masked, [key])
    counts = np.bincount(masked.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    # One in a million would be further from even than this.
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, 255)
    add_masks(masked, [], [key])
    assert np.array_equal(masked, plain)


def test_a_longer_stream_begins_as_a_shorter_one_does():
    key = new_secret()
    short, long = np.zeros(10, np.uint64), np.zeros(CHUNK, np.uint64)
    add_masks(short, [key])
    add_masks(long, [key])
    assert np.array_equal(long[:10], short)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("num_clients", [3, 10, 1000])
@pytest.mark.parametrize("max_value", [1e-3, 1.0, 7.0])
def test_the_largest_sum_does_not_wrap_and_twice_as_fine_would(bits, num_clients, max_value):
    numbers = FixedPoint(bits, max_value, num_clients)
    most = num_clients * round(max_value / numbers.step)
    assert most < 2 ** (bits - 1)
    if bits == 32:
        assert num_clients * round(2 * max_value / numbers.step) >= 2 ** (bits - 1) - num_clients
    total = np.zeros(2, numbers.dtype)
    for _ in range(num_clients):
        entry = np.zeros(2, numbers.dtype)
        numbers.encode(np.array([1e9, -1e9], np.float32), 1.0, entry)
        total += entry
    assert numbers.decode(total, num_clients) == pytest.approx([max_value, -max_value], rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bits", [32, 64])
def test_a_mean_of_whole_numbers_is_the_mean_within_the_stated_error(seed, bits):
    rng = np.random.default_rng(seed)
    num_clients = int(rng.integers(2, 12))
    numbers = FixedPoint(bits, 1.0, num_clients)
    values = rng.uniform(-1, 1, (num_clients, 500)).astype(np.float32)
    # Also weights that are no whole numbers, and some that are a thousandth of others.
    weights = rng.uniform(0.001, 1, num_clients) * 10.0 ** rng.integers(0, 3)
    unit = weight_unit(weights.max())
    parts = [quantized(weight, unit) for weight in weights]
    total = np.zeros(500, numbers.dtype)
    for value, part in zip(values, parts, strict=True):
        entry = np.empty(500, numbers.dtype)
        numbers.encode(value, part / 2**WEIGHT_BITS, entry)
        total += entry
    weight = sum(parts) / 2**WEIGHT_BITS
    found = numbers.decode(total, weight)
    exact = (values.astype(np.float64) * weights[:, None]).sum(0) / weights.sum()
    # The result is a 32-bit float: half of its last bit on top.
    assert np.abs(found - exact).max() <= numbers.error(num_clients, weight) + np.abs(exact).max() * 2.0**-24


def test_whole_numbers_of_examples_are_exact_weights():
    unit = weight_unit(1000.0)
    assert unit == 1024.0
    assert [quantized(count, unit) / 2**WEIGHT_BITS * unit for count in (1, 3, 777, 1000)] == [1, 3, 777, 1000]
    assert quantized(0.0, unit) == 0
    assert quantized(1e-12, unit) == 1


def test_sums_of_counts_are_exact_and_what_is_no_number_is_cut():
    first, second = encode_numbers(np.array([12.0, -0.25, np.nan]), 3), encode_numbers(np.array([30.0, 0.5, 0.0]), 3)
    assert decode_numbers(first + second)[:2].tolist() == [42.0, 0.25]
    assert decode_numbers(first)[2] == pytest.approx(2**62 / 3 * NUMBER_STEP)
