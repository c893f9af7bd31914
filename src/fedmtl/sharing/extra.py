"""What a capability adds to a state, a job, an update or a client's saved state.

The wire format, checkpoints and client states write it without knowing whose it is: they see plain values, and tensors
by slot and key, which are cut, moved and merged as weights under the same keys are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def changed(self, change: Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]) -> Extra:
        """The same values, and what `change` makes of the tensors of every slot."""
        return Extra(self.values, {slot: change(values) for slot, values in self.tensors.items()})


NO_EXTRA = Extra()
# In tensor files an extra's slots are called `extra.<name>/<slot>`. What filters store at a client is `filter.<...>`.
PREFIX, FILTER_PREFIX, SEPARATOR = "extra.", "filter.", "/"


def slot_name(name: str, slot: str, prefix: str = PREFIX) -> str:
    """What a capability's slot is called in a tensor file."""
    return f"{prefix}{name}{SEPARATOR}{slot}"


def to_slots(extras: Mapping[str, Extra], prefix: str = PREFIX) -> dict[str, Mapping[Key, Tensor]]:
    """The tensors of all capabilities as slots of one tensor file."""
    return {
        slot_name(name, slot, prefix): values
        for name, extra in extras.items()
        for slot, values in extra.tensors.items()
    }


def from_slots(
    slots: Slots, values: Mapping[str, Mapping[str, Any]] | None = None, prefix: str = PREFIX
) -> dict[str, Extra]:
    """The extras whose tensors `to_slots` named, with the plain values of each capability where there are any."""
    given = values or {}
    tensors: dict[str, dict[str, Mapping[Key, Tensor]]] = {name: {} for name in given}
    for slot, found in slots.items():
        if slot.startswith(prefix):
            name, _, inner = slot.removeprefix(prefix).partition(SEPARATOR)
            tensors.setdefault(name, {})[inner] = found
    return {name: Extra(given.get(name, {}), found) for name, found in tensors.items()}
