"""Seeds are arguments: each is derived from the run's seed and a purpose, never from what ran before."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on the run's seed and every word of the purpose, and on nothing else."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
