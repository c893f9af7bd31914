"""Masks that cancel in a sum, and the pieces they are made of: shared secrets, keys, streams, whole numbers.

Shamir 1979, How to Share a Secret: a polynomial over the integers modulo a prime, whose value at 0 is the secret. Keys
are agreed on by X25519 and derived by HKDF with SHA-256. Masks are AES-128 in counter mode, shares travel under
AES-GCM. Nothing here knows of clients or rounds: `secure_aggregation.py` is the protocol.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmtl.errors import ConfigError, needs_extra
from fedmtl.methods.noise import derive_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

# The smallest prime above 2**256: every secret of 32 bytes is a number below it.
PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
# Subsets of shares that are tried where some are wrong.
MOST_SUBSETS = 2000
# As in the paper; a longer key takes half as long again, of a time that is most of what masks cost.
STREAM_KEY_BYTES = 16
# Bytes of a stream, and entries of an update, at a time: few enough for a core's cache.
CHUNK, PIECE = 1 << 17, 1 << 15
# A weight is a multiple of 2**-29 of its unit, so that its product with a 32-bit float is exact in 64 bits.
WEIGHT_BITS = 29
# Whole numbers up to this are exact as 64-bit floats; the entry of one client is never larger.
MOST_EXACT = 1 << 52
# Counts, losses and scores are multiples of this.
NUMBER_STEP = 2.0**-30

Masked = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]


def check_available() -> None:
    """Raise a ConfigError with the remedy where the package that computes all this is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(needs_extra("privacy.secure_aggregation", "cryptography", "privacy")) from error


# Shared secrets ------------------------------------------------------------------------------------------------------


def split(secret: bytes, threshold: int, num_shares: int) -> list[bytes]:
    """The shares of a secret at the points 1 to `num_shares`, `threshold` give it back, fewer say nothing."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= num_shares:
        raise ValueError(
            f"a secret of {len(secret)} bytes cannot be split into {num_shares}, {threshold} of which count"
        )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in range(1, num_shares + 1)]


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret that these shares by point give; None where it is none, as of shares that were tampered with."""
    factors = _lagrange(tuple(sorted(shares)))
    total = sum(factor * int.from_bytes(shares[point], "big") for point, factor in factors.items()) % PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total < 1 << 8 * SECRET_BYTES else None


def recover(shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]) -> bytes | None:
    """The secret of so many shares, some of which may be wrong; None where they are too few or too many are wrong."""
    for points in islice(combinations(sorted(shares), threshold), MOST_SUBSETS):
        secret = join({point: shares[point] for point in points})
        if secret is not None and is_right(secret):
            return secret
    return None


def is_share(value: object) -> bool:
    """Whether it could be a share: bytes of a number below the prime."""
    return isinstance(value, bytes) and len(value) == SHARE_BYTES and int.from_bytes(value, "big") < PRIME


def _value(coefficients: list[int], point: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return total


_FACTORS: dict[tuple[int, ...], dict[int, int]] = {}


def _lagrange(points: tuple[int, ...]) -> dict[int, int]:
    """What each point's share counts for the value at 0; those of the last points are remembered."""
    if points not in _FACTORS:
        factors = {}
        for point in points:
            above, below = 1, 1
            for other in points:
                if other != point:
                    above, below = above * other % PRIME, below * (other - point) % PRIME
            factors[point] = above * pow(below, -1, PRIME) % PRIME
        _FACTORS.clear()
        _FACTORS[points] = factors
    return _FACTORS[points]


# Keys ----------------------------------------------------------------------------------------------------------------


def new_secret() -> bytes:
    """A private key, or the seed of a stream."""
    return secrets.token_bytes(SECRET_BYTES)


def public_key(private: bytes) -> bytes:
    return _private_key(private).public_key().public_bytes_raw()


# A client agrees with all others, one after the other.
@lru_cache(maxsize=1)
def _private_key(private: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private)


def agree(private: bytes, public: bytes, *purpose: object) -> bytes:
    """The key that two sides have in common for a purpose; a ValueError where the other side's is no key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    common = _private_key(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), SECRET_BYTES, salt=None, info=_words(purpose)).derive(common)


def seal(key: bytes, text: bytes, *about: object) -> bytes:
    """The text, which only who has the key can read or change; a key serves for one text."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(bytes(12), text, _words(about))


def unseal(key: bytes, sealed: bytes, *about: object) -> bytes | None:
    """The text; None where it was not sealed with this key, or about something else."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(bytes(12), sealed, _words(about))
    except (InvalidTag, ValueError):
        return None


def commitment(secret: bytes, *about: object) -> bytes:
    """What a secret can be recognised by, and not be found from."""
    return derive_key(secret, "commitment", *about)


def _words(parts: Iterable[object]) -> bytes:
    return b"".join(len(word).to_bytes(8, "big") + word for word in (str(part).encode() for part in parts))


# Masks ---------------------------------------------------------------------------------------------------------------


def add_masks(total: Masked, added: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
    """Add and subtract the streams of some keys, in place, modulo two to the power of the numbers' bits.

    All streams go over a part of the numbers before the next part begins: that part stays in the cache.
    """
    streams = [(_stream(key), np.add) for key in added] + [(_stream(key), np.subtract) for key in removed]
    size = total.dtype.itemsize
    zeros, buffer = memoryview(bytes(CHUNK)), bytearray(CHUNK + 15)
    numbers = np.frombuffer(buffer, total.dtype, CHUNK // size)
    for start in range(0, len(total), len(numbers)):
        part = total[start : start + len(numbers)]
        due, mask = zeros[: len(part) * size], numbers[: len(part)]
        for stream, change in streams:
            stream.update_into(due, buffer)
            change(part, mask, out=part)


def _stream(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES128(key[:STREAM_KEY_BYTES]), modes.CTR(bytes(16))).encryptor()


# Whole numbers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedPoint:
    """How the entries of updates become whole numbers that can be summed over so many clients without wrapping.

    An entry is cut to `max_value`, multiplied by the client's weight, at most 1, and rounded to the next multiple of
    `step`, a power of two. What is added to a client's entries afterwards is `headroom` at most.
    """

    bits: int
    max_value: float
    num_clients: int
    headroom: float = 0.0

    @property
    def exponent(self) -> int:
        """The step is two to minus this power: the finest with which a sum over all clients fits."""
        most = min(((1 << self.bits - 1) - 1) // self.num_clients, MOST_EXACT)
        largest = self.max_value + self.headroom
        found = math.floor(math.log2(most / largest))
        # The logarithm is rounded.
        return found if math.ldexp(largest, found) <= most else found - 1

    @property
    def step(self) -> float:
        return 2.0**-self.exponent

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def _signed(self) -> npt.DTypeLike:
        return np.int32 if self.bits == 32 else np.int64

    def encode(self, values: npt.NDArray[np.float32], weight: float, into: Masked) -> None:
        """Write a client's entries as whole numbers; negative ones are counted down from the modulus."""
        signed, scale = into.view(self._signed), weight * 2.0**self.exponent
        # Of 32 bits, and not above the bound: all clients at it must not wrap.
        most = np.float32(self.max_value)
        most = np.nextafter(most, np.float32(0)) if most > self.max_value else most
        cut, whole = np.empty(PIECE, np.float32), np.empty(PIECE, np.float64)
        for start in range(0, len(values), PIECE):
            part = values[start : start + PIECE]
            np.clip(part, -most, most, out=cut[: len(part)])
            np.multiply(cut[: len(part)], scale, out=whole[: len(part)])
            signed[start : start + PIECE] = np.rint(whole[: len(part)], out=whole[: len(part)])

    def decode(self, total: Masked, weight: float) -> npt.NDArray[np.float32]:
        """The mean of the entries from their sum, of clients whose weights add up to this."""
        signed = total.view(self._signed)
        found = np.empty(len(signed), np.float32)
        for start in range(0, len(signed), PIECE):
            found[start : start + PIECE] = signed[start : start + PIECE].astype(np.float64) * (self.step / weight)
        return found

    def error(self, num_clients: int, weight: float) -> float:
        """How far an entry of a mean may lie from that without rounding, for clients whose weights add up to this.

        Half a step for each client, and half of the last bit of each weight. Where weights are whole numbers of
        examples they are exact.
        """
        return num_clients * (self.step / 2 + self.max_value * 2.0**-WEIGHT_BITS) / weight


def weight_unit(largest: float) -> float:
    """A power of two that is at least the largest weight: whole numbers of examples stay exact below it."""
    return 2.0 ** math.ceil(math.log2(largest))


def quantized(weight: float, unit: float) -> int:
    """A weight in parts of `2**WEIGHT_BITS` of its unit; one above 0 does not vanish."""
    part = min(round(weight / unit * (1 << WEIGHT_BITS)), 1 << WEIGHT_BITS)
    return max(part, 1) if weight > 0 else 0


def encode_numbers(values: Numbers, num_clients: int) -> Masked:
    """A client's counts and sums as whole numbers of 64 bits; what is too large, or no number, is cut."""
    most = 2.0**62 / num_clients
    scaled = np.nan_to_num(np.asarray(values, np.float64) / NUMBER_STEP, nan=most, posinf=most, neginf=-most)
    return np.rint(np.clip(scaled, -most, most)).astype(np.int64).view(np.uint64)


def decode_numbers(total: Masked) -> Numbers:
    """The sums of clients' numbers."""
    return total.view(np.int64).astype(np.float64) * NUMBER_STEP
