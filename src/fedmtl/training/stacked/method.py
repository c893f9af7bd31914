"""The half of a local method for clients that train as one computation.

A stack records its step once and replays it, so a method allocates its buffers when the stack is made, and only refills
them for the clients of each round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.plan import NO_EXTRA, Extra
from fedmtl.training.local_method import LocalSettings, Release
from fedmtl.training.stacked.blocks import Block
from fedmtl.training.stacked.plan import Member

if TYPE_CHECKING:
    from fedmtl.training.stacked.stack import Stack


class StackedMethod:
    """The hooks, all empty. `moves_all_rows` is whether token rows that no text of a batch uses get a gradient too.

    `knows_several_tasks` is whether it also works for a client with several tasks, whose gradients are never side by
    side. With a `max_example_norm`, the gradient of every example is clipped to it by itself, a step is of as many
    passes as its examples need, and training.max_grad_norm is not looked at.
    """

    name: ClassVar[str]
    moves_all_rows: ClassVar[bool] = False
    knows_several_tasks: ClassVar[bool] = True
    max_example_norm: float | None = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Of the options that the client's half is made of."""

    def enter(
        self,
        member: Member,
        model: MultiTaskModel,
        settings: LocalSettings,
        round_number: int,
        release: Callable[[], Release] | None,
    ) -> Member:
        """A client with what its round needs, before anything is computed; a FedmtlError costs this client alone."""
        return member

    def most_examples(self, settings: LocalSettings) -> int | None:
        """How many examples of a client a pass has at most, where that is not the largest batch."""
        return None

    def allocate(self, stack: Stack) -> None:
        """Make the buffers, one row for each client that trains a task."""

    def load(self, stack: Stack, members: Sequence[Member]) -> None:
        """Fill the buffers for the clients of a round, in the order of the stack."""

    def adjust(self, task: str, outputs: Tensor) -> Tensor:
        """Return the outputs (clients, examples, outputs) of a task as its loss sees them."""
        return outputs

    def add_noise(self, stack: Stack, task: str | None, is_active: np.ndarray) -> None:
        """Change the gradients of a step's clipped examples, of the clients that make one; this is not recorded."""

    def gradient(self, blocks: Sequence[Block]) -> None:
        """Change gradients before they are clipped and the optimizer moves the values."""

    def finish(self, member: Member, tasks: Sequence[str]) -> Extra:
        """Return what goes into a client's update, which is of these tasks."""
        return NO_EXTRA
