"""Batches without their padding: all real tokens end to end, and where each one belongs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch that was padded on the right to `width`.

    `places` says where in the padded batch, flattened, each token stands; `sources` says which token fills each
    padded place, padding being filled with the first token of its row. Both are None where nothing is packed.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    mask: Tensor
    firsts: Tensor
    places: Tensor | None
    sources: Tensor | None

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    def pad(self, tokens: Tensor) -> Tensor:
        """(tokens, features) -> (rows, width, features)."""
        padded = tokens if self.sources is None else tokens.index_select(0, self.sources)
        return padded.view(self.num_rows, self.width, -1)

    def unpad(self, padded: Tensor) -> Tensor:
        """(rows, width, features) -> (tokens, features)."""
        flat = padded.reshape(self.num_rows * self.width, -1)
        return flat if self.places is None else flat.index_select(0, self.places)


def pack(ids: Tensor, mask: Tensor, segments: Tensor) -> Packed:
    """Drop the padding on a CPU, where work is proportional to tokens; a GPU would have to wait for the lengths."""
    rows, width = ids.shape
    columns = torch.arange(width, device=ids.device)
    starts = torch.arange(0, rows * width, width, device=ids.device)
    if ids.device.type != "cpu":
        positions = columns.expand(rows, width).reshape(-1)
        return Packed(ids.reshape(-1), segments.reshape(-1), positions, mask, starts, None, None)
    lengths = mask.sum(1)
    firsts = torch.cumsum(lengths, 0) - lengths
    places = mask.reshape(-1).nonzero().squeeze(1)
    sources = (firsts[:, None] + columns * mask).reshape(-1)
    return Packed(ids.reshape(-1)[places], segments.reshape(-1)[places], places % width, mask, firsts, places, sources)
