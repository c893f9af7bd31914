"""Slices by vocabulary: a client trains a compacted token table that holds only the rows its texts use.

Rows without a gradient do not move, and token tables are never weight-decayed, so a missing row is a zero
delta and slicing changes no average.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

# Encoders of RoBERTa's kind count positions from the padding id, so low rows keep their index.
NUM_LOW_ROWS = 8

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]


def used_rows(token_ids: Iterable[np.ndarray], pad_id: int) -> Rows:
    """The sorted token rows that some texts use, with the padding row and the lowest rows."""
    parts = [np.unique(ids) for ids in token_ids]
    return np.unique(np.concatenate([*parts, np.arange(NUM_LOW_ROWS), [pad_id]])).astype(np.int64)


def compact_ids(rows: Rows, vocabulary_size: int) -> np.ndarray:
    """token id -> index into the compacted table; ids outside the slice point past its end."""
    index = np.full(vocabulary_size, len(rows), dtype=np.int64)
    index[rows] = np.arange(len(rows))
    return index


def take_rows(table: Tensor, rows: Rows) -> Tensor:
    return table.index_select(0, torch.from_numpy(rows).to(table.device))
