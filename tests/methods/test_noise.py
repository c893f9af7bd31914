import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import binomtest, kstest

from fedmtl.methods.noise import KeyedNoise, derive_key


def drawn(key: bytes, count: int) -> torch.Tensor:
    values = torch.zeros(count)
    KeyedNoise(key).add_to(values, 1.0)
    return values


def test_noise_is_normal():
    values = drawn(derive_key(b"secret", "test"), 200_000)

    assert kstest(values.numpy(), "norm").pvalue > 1e-3
    # Neighbours, and numbers that come from one pair of uniform ones, are independent.
    half = len(values) // 2
    for lag in (1, 2**15, half):
        correlation = float((values[:-lag] * values[lag:]).mean())
        assert abs(correlation) < 4 / (len(values) - lag) ** 0.5


def test_its_moments_are_those_of_the_deviation():
    values = torch.full((300_001,), 5.0)
    KeyedNoise(b"k" * 32).add_to(values, 3.0)
    noise = (values - 5.0) / 3.0

    # Standard errors of the mean, the variance and the fourth moment: 1, sqrt(2) and sqrt(96) over sqrt(n).
    n = len(noise) ** 0.5
    assert abs(float(noise.mean())) < 4 / n
    assert abs(float(noise.pow(2).mean()) - 1) < 4 * 2**0.5 / n
    assert abs(float(noise.pow(4).mean()) - 3) < 4 * 96**0.5 / n


def test_the_same_key_gives_the_same_numbers_and_another_key_others():
    assert torch.equal(drawn(derive_key(b"s", "a", 1), 1000), drawn(derive_key(b"s", "a", 1), 1000))
    others = [derive_key(b"s", "a", 2), derive_key(b"s", "a1"), derive_key(b"t", "a", 1), derive_key(b"s", "a", 1, "")]
    for other in others:
        assert not torch.equal(drawn(derive_key(b"s", "a", 1), 1000), drawn(other, 1000))


def test_numbers_that_are_drawn_later_are_new():
    noise, first, second = KeyedNoise(b"k" * 32), torch.zeros(1000), torch.zeros(1000)
    noise.add_to(first, 1.0)
    noise.add_to(second, 1.0)

    assert not torch.equal(first, second)


def test_the_bits_are_aes_in_counter_mode():
    # One pair of numbers, by hand: the first 31 bits are the radius, the next 32 the angle.
    import math

    stream = Cipher(algorithms.AES256(b"k" * 32), modes.CTR(bytes(16))).encryptor().update(bytes(8))
    first, second = int.from_bytes(stream[:4], "little", signed=True), int.from_bytes(stream[4:], "little", signed=True)
    radius = math.sqrt(-2 * math.log(((first & 0x7FFFFFFF) + 0.5) / 2**31))

    pair = drawn(b"k" * 32, 2).tolist()
    assert abs(pair[0] - radius * math.cos(math.pi * second / 2**31)) < 1e-5
    assert abs(pair[1] - radius * math.sin(math.pi * second / 2**31)) < 1e-5


def test_each_example_is_drawn_by_itself_with_the_chance():
    noise = KeyedNoise(b"k" * 32)
    draws = [noise.chosen(500, 0.03) for _ in range(400)]

    assert binomtest(sum(map(len, draws)), 500 * 400, 0.03).pvalue > 1e-3
    # The number of examples of a draw varies as it should: np(1 - p) = 14.55.
    variance = torch.tensor([float(len(draw)) for draw in draws]).var().item()
    assert 11 < variance < 18.5
    assert all(torch.equal(draw, draw.unique()) for draw in draws)


def test_all_or_none_are_drawn_where_the_chance_says_so():
    assert len(KeyedNoise(b"k" * 32).chosen(100, 1.0)) == 100
    assert len(KeyedNoise(b"k" * 32).chosen(100, 0.0)) == 0
    assert len(KeyedNoise(b"k" * 32).chosen(0, 0.5)) == 0
