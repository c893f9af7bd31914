"""The half of a local method for clients that train as one computation.

A stack records its step once and replays it, so a method allocates its buffers when the stack is made, and only refills
them for the clients of each round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedmtl.training.stacked.blocks import Block
from fedmtl.training.stacked.plan import Member

if TYPE_CHECKING:
    from fedmtl.training.stacked.stack import Stack


class StackedMethod:
    """The hooks, all empty. `moves_all_rows` is whether token rows that no text of a batch uses get a gradient too.

    `knows_several_tasks` is whether it also works for a client with several tasks, whose gradients are never side by
    side.
    """

    name: ClassVar[str]
    moves_all_rows: ClassVar[bool] = False
    knows_several_tasks: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Of the options that the client's half is made of."""

    def allocate(self, stack: Stack) -> None:
        """Make the buffers, one row for each client that trains a task."""

    def load(self, stack: Stack, members: Sequence[Member]) -> None:
        """Fill the buffers for the clients of a round, in the order of the stack."""

    def adjust(self, task: str, outputs: Tensor) -> Tensor:
        """Return the outputs (clients, examples, outputs) of a task as its loss sees them."""
        return outputs

    def gradient(self, blocks: Sequence[Block]) -> None:
        """Change gradients before they are clipped and the optimizer moves the values."""
