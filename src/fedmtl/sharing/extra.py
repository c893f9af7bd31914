"""What a capability carries along with a state, a job, an update or a client's own state.

The wire format, checkpoints and client states write it without knowing whose it is: they see plain values, and tensors
by slot and key, which are cut, moved and merged as weights under the same keys are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedmtl.sharing.keys import Key

Slots = Mapping[str, Mapping[Key, Tensor]]


@dataclass(frozen=True)
class Extra:
    """Plain values, as JSON has them, and tensors by slot and key; one per capability, under its name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Slots = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values) or any(self.tensors.values())

    def slot(self, name: str) -> Mapping[Key, Tensor]:
        """The tensors of a slot; none where there is no such slot."""
        return self.tensors.get(name, {})


NO_EXTRA = Extra()
