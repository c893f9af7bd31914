"""What an engine has of a job until its update comes: a small record, and files that are written again and again.

A fresh file would cost all its pages.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedmtl.errors import FedmtlError, WireError
from fedmtl.federation.messages import ClientId, Failure, Job, Traffic, Update
from fedmtl.federation.wire import decode_update
from fedmtl.federation.wire.indices import Bytes
from fedmtl.federation.wire.messages import answer_bytes

MESSAGE = "message-"


@dataclass(frozen=True)
class OpenJob:
    """What an engine remembers of a job that it has sent: little, so that the job's weights can be let go."""

    round: int
    client: ClientId
    bytes_down: int
    most_bytes_up: int

    @classmethod
    def of(cls, job: Job, bytes_down: int) -> OpenJob:
        """Record a job that was sent with so many bytes."""
        return cls(job.round, job.client, bytes_down, answer_bytes(job))

    def take(self, data: np.ndarray, max_bytes: int) -> Update | Failure:
        """Decode the update, with the bytes that crossed and the seconds it took; a Failure where it cannot be read."""
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


class Spool:
    """Hands out files that nobody uses; as many are made as are in use at once.

    Their names are unique to this spool, so that no process of a run that was killed can write to a file that is
    mapped here; what such a run left is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: list[Path] = []
        self._num_made = 0
        self._prefix = f"{MESSAGE}{secrets.token_hex(4)}-"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{MESSAGE}*"):
            path.unlink(missing_ok=True)

    def take(self) -> Path:
        """A file for one message; it may hold an old one."""
        if self._free:
            return self._free.pop()
        self._num_made += 1
        return self._folder / f"{self._prefix}{self._num_made}"

    def give_back(self, path: Path) -> None:
        """Nobody reads the file any more: it may be written over."""
        self._free.append(path)


def write_message(path: Path, message: Bytes) -> None:
    """Write a message over whatever the file holds."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            rest = message.data
            while rest:
                rest = rest[os.write(file, rest) :]
            os.ftruncate(file, len(message))
        finally:
            os.close(file)
    except OSError as error:
        raise FedmtlError(
            f"{path.parent}: cannot be written ({error.strerror}); free its disk, or set `output`"
        ) from error


def map_message(path: Path) -> Bytes:
    """The message in a file, of which a process holds the pages that it reads; writing to it changes no file."""
    return np.memmap(path, dtype=np.uint8, mode="c")
