"""Flower's object store with large objects in files: waiting messages cost no memory."""

from __future__ import annotations

from pathlib import Path

from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

SMALL = 1 << 16


class ObjectFiles(InMemoryObjectStore):
    """Contents of more than `SMALL` bytes are files of a folder, named by their hash."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
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
