"""What an update filter is, and what it knows of a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fedmtl.config import Config
from fedmtl.federation.messages import ClientId, Job, Update
from fedmtl.sharing.plan import Extra
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import Release


@dataclass(frozen=True)
class FilterClient:
    """The client that an update leaves: its job, what the filter stored there, and the name of the token table.

    `stored` is of the last round whose update the server accepted. Where the job has rows, the values called `table`
    are these rows of it. `folder` is the client's, where a capability may leave files; `tasks` are the model's. Of a
    training job `release` says what the answer is known by, for noise that nobody else may know. `required` is what the
    client's owner demands of the capability.
    """

    job: Job
    stored: Extra
    table: str
    folder: Path = Path()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    release: Callable[[], Release] | None = None
    required: Mapping[str, Any] = field(default_factory=dict)


class Identity(Protocol):
    """Who a client is to the others: a key that it signs with, and what it knows of their keys."""

    @property
    def public_key(self) -> str:
        """The key that the others know it by, as text."""
        ...

    def sign(self, message: bytes) -> bytes: ...

    def refuses(self, client: ClientId, public_key: str, message: bytes, signature: bytes) -> str | None:
        """Why a message is not another client's: its signature is wrong, or its key is not the one known here."""
        ...


@dataclass(frozen=True)
class ExchangeClient:
    """The client at which a capability answers an exchange: its job and its folder, where it may leave files.

    `names` are those of the model's parameters. `identity` is None in a simulation. `required` is what the client's
    owner demands of the capability.
    """

    job: Job
    folder: Path
    names: Sequence[str] = ()
    identity: Identity | None = None
    required: Mapping[str, Any] = field(default_factory=dict)


class UpdateFilter:
    """The hooks, all empty. A filter is made of its options: at a client for every job, at the server for every round.

    Filters of other packages come in the order of their names, then those that the wire format needs. One that has a
    part in evaluation jobs too says so by `scores`.
    """

    name: ClassVar[str]
    scores: ClassVar[bool] = False

    def conflict(self, config: Config) -> str | None:
        """Why the filter cannot work in a run of this config, which is then refused; None where it can."""
        return None

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        """The update as it goes on, and the tensors that replace `client.stored` if the server accepts it."""
        return update, client.stored

    def scores_at_client(self, update: Update, client: FilterClient) -> Update:
        """The answer to an evaluation job as it leaves, with sums for every task."""
        return update

    def at_server(self, update: Update, job: Job) -> Update:
        """The update as it counts, of one that was decoded and passed all checks; the job is without its tensors.

        A delta is decoded when it is looked at. What is returned stays in memory until it is averaged.
        """
        return update
