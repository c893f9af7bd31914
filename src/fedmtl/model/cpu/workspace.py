"""Memory for what one pass through the encoder keeps, used again by the next pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that only grow; what is in one is valid until its name is taken again."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of that shape, with anything in it."""
        size = math.prod(shape)
        known = self._kept.get(name)
        if known is None or known.numel() < size or known.dtype != dtype:
            # Batches differ a little in size: some room spares the next one a new buffer. What is made while scoring
            # must serve training too, which an inference tensor may not.
            with torch.inference_mode(False):
                self._kept[name] = known = torch.empty(size + size // 8, dtype=dtype)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return known.as_strided(shape, strides)
