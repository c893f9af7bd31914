"""Giving memory back: batches of many sizes leave glibc's heap full of holes, which it does not return by itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

# Returned pages cost a little when they are needed again, so that it is done only when there are many.
GROWTH = 64 << 20


def heap_trimmer(growth: int = GROWTH) -> Callable[[], None]:
    """A function to call between jobs: trims the heap where it grew by that many bytes since it was last trimmed."""
    trim = _malloc_trim()
    if trim is None:
        return lambda: None
    low = [_resident()]

    def check() -> None:
        if _resident() > low[0] + growth:
            trim(0)
            low[0] = _resident()

    return check


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, or None where there is another allocator."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found if Path("/proc/self/statm").exists() else None


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
