"""The files through which Jobs and Updates pass, written again and again: a fresh one would cost all its pages."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from fedmtl.errors import FedmtlError
from fedmtl.federation.wire.indices import Bytes

MESSAGE = "message-"


class Spool:
    """Hands out files that nobody uses; as many are made as are in use at once.

    Their names are this spool's own, so that no process of a run that was killed can write to a file that is mapped
    here; what such a run left is removed.
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
