"""Gaussian noise from a keyed stream: whoever lacks the key cannot tell it from chance, whoever has it draws it again.

The bits are AES-256 in counter mode, the normal numbers Box and Muller's. A general-purpose generator will not do: its
later output follows from enough of its earlier output, and what a site adds to its updates is public but for its
gradients. A key belongs to one purpose and one release (`derive_key`): drawn again for the same release it gives the
same numbers, so an answer that is sent twice tells nothing more.

Not covered: what the last bits of floating-point sums tell about the numbers that went in (Mironov 2012).
"""

from __future__ import annotations

import hashlib
import hmac
import math

import torch
from torch import Tensor

from fedmtl.errors import ConfigError, needs_extra

KEY_BYTES = 32
# No normal number is larger: its radius follows from 31 bits and a half.
LARGEST_NORMAL = 6.7
# Normal numbers of one piece: its bits and their halves stay in the cache.
_PIECE = 2**16


def derive_key(secret: bytes, *purpose: object) -> bytes:
    """A key for one purpose, from which neither the secret nor the key of another purpose follows."""
    words = b"".join(len(word).to_bytes(8, "big") + word for word in (str(part).encode() for part in purpose))
    return hmac.digest(secret, words, hashlib.sha256)


class KeyedNoise:
    """Standard normal and uniform numbers, in order, from one key."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise ConfigError(needs_extra("privacy", "cryptography", "privacy")) from error
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def add_to(self, values: Tensor, deviation: float) -> None:
        """Add an independent normal number of that standard deviation to every entry, in place."""
        flat = values.view(-1)
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            piece.add_(self._normal(piece.numel()).to(piece.device, piece.dtype), alpha=deviation)

    def chosen(self, num_examples: int, chance: float) -> Tensor:
        """Which of these examples are drawn, each by itself with that chance, in rising order."""
        bits = self._bits(2 * num_examples).view(num_examples, 2).to(torch.int64)
        # 53 bits of each pair: as fine as a double between 0 and 1 can be.
        whole = ((bits[:, 0] & 0x1FFFFF) << 32) | (bits[:, 1] & 0xFFFFFFFF)
        return (whole.to(torch.float64) * 2.0**-53 < chance).nonzero().view(-1)

    def _normal(self, count: int) -> Tensor:
        half = -(-count // 2)
        bits = self._bits(2 * half)
        # 31 bits with a half: never 0, exact where it is small, which is where the tail comes from (up to 6.7).
        radius = (bits[:half] & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).log_().mul_(-2.0).clamp_(min=0.0).sqrt_()
        angle = bits[half:].float().mul_(math.pi * 2.0**-31)
        return torch.cat([radius * angle.cos(), radius * angle.sin_()])[:count]

    def _bits(self, count: int) -> Tensor:
        """So many whole numbers of 32 bits."""
        if not count:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(bytearray(self._stream.update(bytes(4 * count))), dtype=torch.int32)
