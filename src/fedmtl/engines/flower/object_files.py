"""Messages as files: those that wait for their node, and answers as they come, each within what it may bring."""

from __future__ import annotations

import re
import secrets
import shutil
import threading
from pathlib import Path

from fedmtl.engines.flower.private import (
    InMemoryObjectStore,
    NoObjectInStoreError,
    ObjectTree,
    get_object_id,
)
from fedmtl.errors import WireError
from fedmtl.runs.folder import make_private_folder

SMALL = 1 << 16
# Of a message, besides the chunks of its frame.
MOST_OBJECTS = 64
# What Flower writes around the content of an object.
OVERHEAD = 1 << 12

_ID = re.compile(r"[0-9a-f]{64}")


class ObjectFiles(InMemoryObjectStore):
    """Flower's object store, in which contents of more than `SMALL` bytes are files named by their hash."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        make_private_folder(folder)
        self._folder = folder

    def put(self, object_id: str, object_content: bytes) -> None:
        if len(object_content) <= SMALL:
            super().put(object_id, object_content)
            return
        if get_object_id(object_content) != object_id:
            raise ValueError(f"object {object_id} does not fit its hash")
        with self.lock_store:
            if object_id not in self.store:
                raise NoObjectInStoreError(f"object {object_id} was not announced")
            if self.store[object_id].is_available:
                return
        (self._folder / object_id).write_bytes(object_content)
        with self.lock_store:
            if object_id in self.store:
                self.store[object_id].is_available = True

    def get(self, object_id: str) -> bytes | None:
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None or not entry.is_available or entry.content:
                return None if entry is None else entry.content
            return (self._folder / object_id).read_bytes()

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            super().delete(object_id)
            if object_id not in self.store:
                (self._folder / object_id).unlink(missing_ok=True)

    def is_whole(self, object_id: str) -> bool:
        """Whether an object and all below it have come."""
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and entry.is_available and all(map(self.is_whole, entry.child_object_ids))

    def has(self, object_id: str) -> bool:
        with self.lock_store:
            return object_id in self.store


class Upload:
    """One answer as it comes, in a separate folder: nothing of it is shared with what another site sends.

    It takes the objects that were announced, each once, and at most `most_bytes` of them together.
    """

    def __init__(self, folder: Path, node_id: int, tree: ObjectTree, most_bytes: int, chunk_bytes: int) -> None:
        self.node_id, self.root = node_id, tree.object_id
        self.session = secrets.token_hex(16)
        self.failure = ""
        self._folder = folder / f"up-{self.session}"
        self._most_bytes, self._num_bytes = most_bytes + OVERHEAD, 0
        self._missing = _announced(tree, most_bytes // chunk_bytes + MOST_OBJECTS)
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        make_private_folder(self._folder)

    def missing(self) -> list[str]:
        with self._lock:
            return sorted(self._missing)

    def is_whole(self) -> bool:
        with self._lock:
            return not self._missing

    def put(self, object_id: str, content: bytes) -> bool:
        """Whether the object was taken; too many bytes make the whole answer a failure."""
        with self._lock:
            if self.failure or object_id not in self._missing:
                return object_id in self._sizes
            if self._num_bytes + len(content) > self._most_bytes:
                self.failure = f"its answer has more than {self._most_bytes} bytes"
                return False
            if get_object_id(content) != object_id:
                raise ValueError("an object does not fit its hash")
            (self._folder / object_id).write_bytes(content)
            self._num_bytes += len(content)
            self._sizes[object_id] = len(content)
            self._missing.discard(object_id)
            return True

    def take(self, object_id: str) -> bytes:
        """An object that has come; it is gone afterwards, so that an answer is on the disk once."""
        with self._lock:
            if self._sizes.pop(object_id, None) is None:
                raise KeyError(f"object {object_id[:16]} is named twice, or did not come")
            path = self._folder / object_id
            content = path.read_bytes()
            path.unlink()
            return content

    def delete(self) -> None:
        with self._lock:
            self._missing, self._sizes = set(), {}
            self.failure = self.failure or "its message is closed"
            shutil.rmtree(self._folder, ignore_errors=True)


def _announced(tree: ObjectTree, most: int) -> set[str]:
    """The names of a tree's objects; a name that is none, or that repeats, or too many of them are a WireError."""
    names: set[str] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not _ID.fullmatch(node.object_id):
            raise WireError("its answer names an object that has no hash for a name")
        if node.object_id in names:
            raise WireError("its answer names an object twice")
        names.add(node.object_id)
        if len(names) + len(waiting) + len(node.children) > most:
            raise WireError(f"its answer has more than {most} parts")
        waiting += node.children
    return names
