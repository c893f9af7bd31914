"""Sorted indices in few bytes: gaps as variable-length numbers, or a bitmap where that is shorter.

The first byte says which. Token rows and the indices of a top-k selection travel like this.
"""

from __future__ import annotations

import numpy as np

GAPS, BITMAP = 0, 1
# Seven bits a byte: five bytes hold an index below 2**35, and nobody has a tensor that large.
MOST_BYTES = 5

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def encode_indices(indices: Indices) -> Bytes:
    """The bytes of indices that rise strictly from 0 or more."""
    if not len(indices):
        return np.array([GAPS], dtype=np.uint8)
    gaps = _encode_gaps(np.diff(indices, prepend=-1) - 1)
    bitmap_size = int(indices[-1]) // 8 + 1
    if len(gaps) <= bitmap_size:
        return np.concatenate([np.array([GAPS], dtype=np.uint8), gaps])
    bits = np.zeros(8 * bitmap_size, dtype=np.uint8)
    bits[indices] = 1
    return np.concatenate([np.array([BITMAP], dtype=np.uint8), np.packbits(bits)])


def decode_indices(data: Bytes, count: int, end: int | None = None) -> Indices:
    """The `count` indices, all below `end`; a ValueError for any other bytes, before much memory is taken."""
    # One index takes a bit at least, and a bitmap is sent only where gaps would be longer.
    if len(data) < 1 or count > 8 * len(data) or len(data) > 1 + MOST_BYTES * count:
        raise ValueError(f"{len(data)} bytes cannot hold {count} indices")
    if data[0] == GAPS:
        gaps = _decode_gaps(data[1:])
        indices: Indices = np.cumsum(gaps + 1) - 1
    elif data[0] == BITMAP:
        indices = np.flatnonzero(np.unpackbits(data[1:]))
    else:
        raise ValueError(f"indices of the unknown kind {data[0]}")
    if len(indices) != count:
        raise ValueError(f"{len(indices)} indices came, {count} are due")
    if end is not None and count and indices[-1] >= end:
        raise ValueError(f"the index {indices[-1]} is past the end, {end}")
    return indices


def _encode_gaps(gaps: Indices) -> Bytes:
    lengths = np.ones(len(gaps), dtype=np.int64)
    for more in range(1, MOST_BYTES):
        lengths += gaps >= 1 << 7 * more
    starts = np.cumsum(lengths) - lengths
    encoded = np.empty(int(lengths.sum()), dtype=np.uint8)
    for position in range(int(lengths.max())):
        here = lengths > position
        follows = np.where(lengths[here] > position + 1, 0x80, 0)
        encoded[starts[here] + position] = (gaps[here] >> 7 * position) & 0x7F | follows
    return encoded


def _decode_gaps(data: Bytes) -> Indices:
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise ValueError("the last index is cut off")
    lengths = np.diff(ends, prepend=-1)
    starts = ends - lengths + 1
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > MOST_BYTES:
        raise ValueError("an index has too many bytes")
    gaps = np.zeros(len(ends), dtype=np.int64)
    for position in range(longest):
        here = lengths > position
        gaps[here] |= (data[starts[here] + position] & 0x7F).astype(np.int64) << 7 * position
    return gaps
