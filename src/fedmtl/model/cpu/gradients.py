"""Where the gradients of the encoder's values go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Gradients:
    """A tensor to write each wanted gradient into: the one it is kept in, where there is one, or a fresh one."""

    def __init__(self, wanted: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        self._wanted, self._kept = wanted, kept
        self.fresh: dict[str, Tensor] = {}

    def fresh_in_order(self) -> list[Tensor | None]:
        """The gradients that were wanted and not kept, None where nothing wrote one."""
        return [self.fresh.get(name) for name in self._wanted if name not in self._kept]

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def wants_any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._wanted)

    def into(self, name: str) -> Tensor:
        """What is in it is overwritten, not added to."""
        if name in self._kept:
            return self._kept[name]
        self.fresh[name] = torch.empty_like(self._wanted[name], requires_grad=False)
        return self.fresh[name]

    def put(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and self.wants(name):
            self.into(name).copy_(gradient.view(self._wanted[name].shape))
