"""Batches without their padding: all real tokens end to end, and where each one belongs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch that was padded on the right.

    `places` says where in the padded batch, flattened, each token stands; `sources` says which token fills each
    padded place, padding being filled with the first token of its row.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    mask: Tensor
    firsts: Tensor
    places: Tensor
    sources: Tensor

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    def pad(self, tokens: Tensor) -> Tensor:
        """(tokens, features) -> (rows, width, features)."""
        return tokens.index_select(0, self.sources).view(self.num_rows, self.width, -1)


def pack(ids: Tensor, mask: Tensor, segments: Tensor) -> Packed:
    """Drop the padding on a CPU, where work is proportional to tokens; a GPU would have to wait for the lengths."""
    rows, width = ids.shape
    columns = torch.arange(width, device=ids.device)
    if ids.device.type != "cpu":
        places = torch.arange(rows * width, device=ids.device)
        return Packed(
            ids.reshape(-1), segments.reshape(-1), places % width, mask, places[::width].clone(), places, places
        )
    lengths = mask.sum(1)
    firsts = torch.cumsum(lengths, 0) - lengths
    places = mask.reshape(-1).nonzero().squeeze(1)
    sources = (firsts[:, None] + columns * mask).reshape(-1)
    return Packed(ids.reshape(-1)[places], segments.reshape(-1)[places], places % width, mask, firsts, places, sources)
