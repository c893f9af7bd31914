"""Who may join, and for which tasks: a book of public keys next to the server's certificates."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from fedmtl.engines.flower.certificates import CERTIFICATE, KEY, check_public_key
from fedmtl.engines.flower.fleet_api import ServerCertificate
from fedmtl.errors import FedmtlError
from fedmtl.runs import write_atomic

BOOK = "enrolled.json"


class Entry(TypedDict):
    """A site in the book."""

    key: str
    tasks: list[str]


class Enrolments(Protocol):
    """What the server asks of whoever keeps the list."""

    def tasks(self) -> Mapping[str, Collection[str]]:
        """Every name with the tasks it may bring."""
        ...

    def name_of(self, key: bytes) -> str | None:
        """Whose key it is; None where keys are not used."""
        ...

    def keys(self) -> list[bytes]: ...

    def certificate(self) -> ServerCertificate | None: ...


@dataclass(frozen=True)
class NoKeys:
    """Sites on this machine are taken at their word; who there may be follows from the config."""

    held: Mapping[str, Collection[str]]

    def tasks(self) -> Mapping[str, Collection[str]]:
        return self.held

    def name_of(self, key: bytes) -> str | None:
        return None

    def keys(self) -> list[bytes]:
        return []

    def certificate(self) -> ServerCertificate | None:
        return None


@dataclass(frozen=True)
class KeyBook:
    """The enrolled sites of a folder that `fedmtl certs init` made; read anew every time it is asked."""

    folder: Path

    def tasks(self) -> Mapping[str, Collection[str]]:
        return {name: entry["tasks"] for name, entry in read_book(self.folder).items()}

    def name_of(self, key: bytes) -> str | None:
        found = [name for name, entry in read_book(self.folder).items() if entry["key"].encode() == key]
        # A key that was struck off is nobody's, which is not the same as asking for none.
        return found[0] if found else ""

    def keys(self) -> list[bytes]:
        return [entry["key"].encode() for entry in read_book(self.folder).values()]

    def certificate(self) -> ServerCertificate | None:
        paths = [self.folder / CERTIFICATE, self.folder / KEY]
        for path in paths:
            if not path.is_file():
                raise FedmtlError(f"{path}: no such file; make it with `fedmtl certs init {self.folder}`")
        return ServerCertificate(*paths)


def read_book(folder: Path) -> dict[str, Entry]:
    path = folder / BOOK
    if not path.exists():
        return {}
    try:
        book: dict[str, Entry] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedmtlError(f"{path}: cannot be read ({error}); enrol the sites again") from error
    return book


def enroll(folder: Path, name: str, public_key: bytes, tasks: Collection[str]) -> None:
    """Enter a site, or change what it is enrolled for; a key belongs to one name."""
    key = check_public_key(public_key, name)
    book = read_book(folder)
    for other, entry in book.items():
        if other != name and entry["key"] == key:
            raise FedmtlError(
                f"{name}: this key is enrolled as {other}; make one for each site with `fedmtl certs node`"
            )
    book[name] = {"key": key, "tasks": sorted(tasks)}
    write_atomic(folder / BOOK, json.dumps(book, indent=1).encode())
