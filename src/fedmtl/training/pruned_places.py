"""Where in a client's flat buffers the pruned weights lie."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmtl.model.binding import BoundModel
from fedmtl.model.keys import Key


class PrunedPlaces:
    """Zeroes pruned weights, or their gradients, by one multiplication over the part of a buffer that has any.

    `pruned` is true where a weight is; keys that do not train here are left out.
    """

    def __init__(self, bound: BoundModel, pruned: Mapping[Key, Tensor]) -> None:
        flat = bound.flat
        own = {place.start: (place, pruned[key]) for key, place in flat.places.items() if key in pruned}
        start = min(own, default=0)
        self._span = slice(start, max((place.stop for place, _ in own.values()), default=0))
        size = self._span.stop - start
        self._kept = bound.buffers.take("kept", size, flat.values.dtype, flat.values.device).fill_(1.0)
        for place, mask in own.values():
            self._kept[place.start - start : place.stop - start].copy_(~mask.reshape(-1))

    def clear(self, buffer: Tensor) -> None:
        buffer[self._span].mul_(self._kept)
