"""Tokens on the device: all sequences of some token folders, end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmtl.model.bert.stacked import StackedBatch
from fedmtl.tasks.tokens import open_tokens

# The sequence that stands where there is no example: one padding token.
NOTHING = 0


@dataclass(frozen=True)
class TokenStore:
    """`begins` says at which sequence each part of a folder starts.

    An example without windows is that plus its index in the folder.
    """

    ids: Tensor
    segments: Tensor
    starts: Tensor
    lengths: Tensor
    host_lengths: np.ndarray
    begins: Mapping[Path, tuple[int, ...]]

    def sequences(self, folder: Path, examples: np.ndarray) -> np.ndarray:
        """(examples, parts)."""
        return np.stack([examples + begin for begin in self.begins[folder]], -1)


def open_store(folders: Iterable[Path], pad_id: int, device: torch.device) -> TokenStore:
    ids, segments, lengths = [np.full(1, pad_id, np.int32)], [np.zeros(1, np.uint8)], [np.ones(1, np.int64)]
    begins: dict[Path, tuple[int, ...]] = {}
    total = 1
    for folder in folders:
        firsts: list[int] = []
        for part in open_tokens(folder).parts:
            firsts.append(total)
            ids.append(part.ids)
            segments.append(part.segments)
            lengths.append(part.sequence_lengths())
            total += len(lengths[-1])
        begins[folder] = tuple(firsts)
    every = np.concatenate(lengths)
    starts = np.cumsum(every) - every
    arrays = (np.concatenate(ids), np.concatenate(segments), starts, every)
    on_device = [torch.from_numpy(array).to(device) for array in arrays]
    return TokenStore(on_device[0], on_device[1], on_device[2], on_device[3], every, begins)


def stacked_batch(
    store: TokenStore, index: Tensor, num_rows: int, sequences: Tensor, num_tokens: int, width: int
) -> StackedBatch:
    """Return the batch of these sequences (clients, sequences), padded to `num_tokens` for each client.

    `index` (clients, vocabulary) maps token ids into each client's compacted table of `num_rows`.
    """
    lengths = store.lengths[sequences]
    ends = lengths.cumsum(1)
    starts = ends - lengths
    columns = torch.arange(num_tokens, device=sequences.device).expand(len(sequences), -1)
    owners = torch.searchsorted(ends, columns.contiguous(), right=True)
    is_real = owners < sequences.shape[1]
    owner = owners.clamp(max=sequences.shape[1] - 1)
    positions = (columns - starts.gather(1, owner)) * is_real
    at = store.starts[sequences].gather(1, owner) + positions
    # Padding is spread over the rows: adding many zeros to one of them would take long.
    ids = torch.where(is_real, index.gather(1, store.ids[at].long()), columns % num_rows)
    return StackedBatch(ids, positions, store.segments[at] * is_real, owners, starts, lengths, width)
