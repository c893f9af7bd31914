"""What an update filter is, and what it knows of a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedmtl.config import Config
from fedmtl.federation.messages import Job, Update
from fedmtl.sharing.plan import Extra


@dataclass(frozen=True)
class FilterClient:
    """The client that an update leaves: its job, what the filter stored there, and the name of the token table.

    `stored` is of the last round whose update the server accepted. Where the job has rows, the values called `table`
    are these rows of it.
    """

    job: Job
    stored: Extra
    table: str


class UpdateFilter:
    """The hooks, all empty. A filter is made of its options: at a client for every job, at the server for every round.

    Filters of other packages come in the order of their names, then those that the wire format needs.
    """

    name: ClassVar[str]

    def conflict(self, config: Config) -> str | None:
        """Why the filter cannot work in a run of this config, which is then refused; None where it can."""
        return None

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        """The update as it goes on, and the tensors that replace `client.stored` if the server accepts it."""
        return update, client.stored

    def at_server(self, update: Update, job: Job) -> Update:
        """The update as it counts, of one that was decoded and passed all checks; the job is without its tensors.

        A delta is decoded when it is looked at. What is returned stays in memory until it is averaged.
        """
        return update
