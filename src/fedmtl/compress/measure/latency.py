"""How long passes take.

Models are asked in turns, a block of passes each, so that what else runs on the machine slows all of them alike. The
first pass of a block is not counted: others have had the caches since the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedmtl.compress.measure.measured import Timing

BLOCK = 10
# Any prime spreads ids over a vocabulary.
STRIDE = 7919

# Makes a number of passes, and gives the seconds of each.
Block = Callable[[int], list[float]]


def time_block(make_pass: Callable[[], object], passes: int) -> list[float]:
    """The seconds of each of so many passes, after one that is not counted."""
    make_pass()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        make_pass()
        seconds.append(time.perf_counter() - start)
    return seconds


def in_turns(blocks: Sequence[Block], repeats: int, block: int = BLOCK) -> Iterator[list[list[float]]]:
    """Ask everybody for a block of passes until each made `repeats`; after every turn, all seconds so far."""
    for ask in blocks:
        ask(2)
    taken: list[list[float]] = [[] for _ in blocks]
    for start in range(0, repeats, block):
        for ask, own in zip(blocks, taken, strict=True):
            own += ask(min(block, repeats - start))
        yield taken


def timing(threads: int, seconds: Sequence[float], batch: int, waiting: float | None = None) -> Timing:
    """What these passes of `batch` examples come to."""
    median, p95 = (float(np.quantile(seconds, share)) for share in (0.5, 0.95))
    return Timing(threads, median, p95, batch * len(seconds) / sum(seconds), waiting)


def made_up_ids(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Token ids from all over the vocabulary: a text of one word would find its row in the cache."""
    ids: np.ndarray = (np.arange(rows * length, dtype=np.int64) * STRIDE % vocabulary).reshape(rows, length)
    return ids
