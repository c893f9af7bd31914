"""What an engine remembers of a Job until it is answered, and how the bytes of an answer become an Update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedmtl.errors import WireError
from fedmtl.federation.messages import ClientId, Failure, Job, Traffic, Update
from fedmtl.federation.wire import decode_update
from fedmtl.federation.wire.messages import answer_bytes


@dataclass(frozen=True)
class Asked:
    """Small, so that the job's weights can be let go."""

    round: int
    client: ClientId
    bytes_down: int
    most_bytes_up: int

    def take(self, data: np.ndarray, max_bytes: int) -> Update | Failure:
        """The answer, with what crossed and how long it took; a Failure where it cannot be read."""
        try:
            update, seconds = decode_update(data, max_bytes, self.most_bytes_up)
        except (WireError, ValueError) as error:
            return self.failed(str(error))
        traffic = Traffic(self.bytes_down, len(data), seconds)
        if update.client != self.client:
            return Failure(self.round, self.client, f"answered as {update.client}", traffic)
        return replace(update, traffic=traffic)

    def failed(self, reason: str) -> Failure:
        return Failure(self.round, self.client, reason, Traffic(self.bytes_down))


def asked_for(job: Job, bytes_down: int) -> Asked:
    return Asked(job.round, job.client, bytes_down, answer_bytes(job))
