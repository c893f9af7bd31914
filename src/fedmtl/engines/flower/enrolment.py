"""Who may join, for which tasks and with how many examples: a book of public keys next to the server's certificates."""

from __future__ import annotations

import fcntl
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedmtl.engines.flower.certificates import (
    CERTIFICATE,
    KEY,
    ServerCertificate,
    check_name,
    check_public_key,
    fingerprint,
)
from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt, read_json
from fedmtl.runs.folder import write_atomic

BOOK = "enrolled.json"
REMEDY = "mend it, or remove it and enrol the sites again"
MOST_EXAMPLES = 1 << 53
# What a config takes for the name of a task.
TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Of `examples`, for every task that is not listed with a number.
EVERY = "*"


@dataclass(frozen=True)
class Entry:
    """A site in the book; `examples` bounds what it counts for, by task, `*` standing for the others."""

    key: str
    tasks: tuple[str, ...]
    examples: Mapping[str, int]

    def most_examples(self, task: str) -> int | None:
        return self.examples.get(task, self.examples.get(EVERY))

    def words(self) -> str:
        """The entry without its key, for people."""
        bounds = [f"{'each task' if task == EVERY else task} at most {most}" for task, most in self.examples.items()]
        return (
            f"tasks {', '.join(self.tasks)}; examples {', '.join(bounds) or 'not bounded'}; key {fingerprint(self.key)}"
        )


Book = Mapping[str, Entry]


class Enrolments(Protocol):
    """What the server asks of whoever keeps the list; every answer is of this moment."""

    def tasks(self) -> Mapping[str, Collection[str]]:
        """Every name with the tasks it may bring."""
        ...

    def name_of(self, key: bytes) -> str | None:
        """Whose key it is, "" for nobody's; None where keys are not used."""
        ...

    def most_examples(self, client: str, task: str) -> int | None:
        """How many examples of a task a site counts for at most; None where that is not bounded."""
        ...

    def certificate(self) -> ServerCertificate | None: ...

    def problem(self) -> str | None:
        """Why the list cannot be read now, where an older one is still in force."""
        ...


@dataclass(frozen=True)
class NoKeys:
    """Accepts sites on this machine without keys, under the names that the config has."""

    tasks_by_client: Mapping[str, Collection[str]]

    def tasks(self) -> Mapping[str, Collection[str]]:
        return self.tasks_by_client

    def name_of(self, key: bytes) -> str | None:
        return None

    def most_examples(self, client: str, task: str) -> int | None:
        return None

    def certificate(self) -> ServerCertificate | None:
        return None

    def problem(self) -> str | None:
        return None


class KeyBook:
    """The enrolled sites of a folder that `fedmtl certs init` made.

    It follows the file. While that cannot be read, the last good one stays in force, and `problem` says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._book: Book | None = None
        self._names: dict[bytes, str] = {}
        self._problem: str | None = None

    def tasks(self) -> Mapping[str, Collection[str]]:
        return {name: entry.tasks for name, entry in self._read().items()}

    def name_of(self, key: bytes) -> str | None:
        self._read()
        # A key that was struck off is nobody's, which is not the same as asking for none.
        return self._names.get(key, "")

    def most_examples(self, client: str, task: str) -> int | None:
        entry = self._read().get(client)
        return None if entry is None else entry.most_examples(task)

    def certificate(self) -> ServerCertificate | None:
        paths = [self._folder / CERTIFICATE, self._folder / KEY]
        for path in paths:
            if not path.is_file():
                raise FedmtlError(f"{path}: no such file; make it with `fedmtl certs init {self._folder}`")
        return ServerCertificate(*paths)

    def problem(self) -> str | None:
        self._read()
        return self._problem

    def _read(self) -> Book:
        with self._lock:
            stamp = _stamp(self._folder / BOOK)
            if self._book is None or stamp != self._stamp:
                try:
                    if stamp is None and self._book:
                        raise FedmtlError(f"{self._folder / BOOK}: is gone; strike sites off with `fedmtl unenroll`")
                    self._book = read_book(self._folder)
                    self._names = {entry.key.encode(): name for name, entry in self._book.items()}
                    self._problem = None
                except FedmtlError as error:
                    if self._book is None:
                        raise
                    self._problem = f"{error}; who was enrolled before still is"
                self._stamp = stamp
            return self._book


def read_book(folder: Path) -> dict[str, Entry]:
    """The book as it is now; anything that is no book is one line."""
    path = folder / BOOK
    if _stamp(path) is None:
        return {}
    content = read_json(path, REMEDY)
    try:
        if not isinstance(content, dict):
            raise FedmtlError("not an object")
        book = {check_name(name): _entry(name, value) for name, value in content.items()}
        if len({entry.key for entry in book.values()}) < len(book):
            raise FedmtlError("one key under two names")
    except (ValueError, FedmtlError) as error:
        raise FedmtlError(f"{path}: cannot be read ({excerpt(error)}); {REMEDY}") from error
    return book


def enroll(
    folder: Path,
    name: str,
    public_key: bytes,
    tasks: Collection[str],
    examples: Mapping[str, int] | None = None,
    *,
    replace: bool = False,
) -> tuple[Entry | None, Entry]:
    """Enter a site; a key belongs to one name, and a name that is there already needs `replace`.

    Returns the entry that was replaced, if any, and the new one.
    """
    key = check_public_key(public_key, check_name(name))
    entry = _entry(name, {"key": key, "tasks": sorted(set(tasks)), "examples": dict(examples or {})})
    with _locked(folder):
        book = read_book(folder)
        before = book.get(name)
        if before is not None and before != entry and not replace:
            raise FedmtlError(f"{name}: is enrolled already ({before.words()}); give --replace to change that")
        for other, known in book.items():
            if other != name and known.key == key:
                raise FedmtlError(
                    f"{name}: this key is enrolled as {other}; make one for each site with `fedmtl certs node`"
                )
        _write_book(folder, {**book, name: entry})
    return before, entry


def unenroll(folder: Path, name: str) -> Entry:
    """Strike a site off; a running server stops serving it at once."""
    with _locked(folder):
        book = read_book(folder)
        if name not in book:
            known = ", ".join(sorted(book)) or "none"
            raise FedmtlError(f"{name!r:.80}: is not enrolled in {folder / BOOK}; enrolled are {known}")
        entry = book.pop(name)
        _write_book(folder, book)
    return entry


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or not {"key", "tasks"} <= set(value) <= {"key", "tasks", "examples"}:
        raise FedmtlError(f"{name}: its entry is not {{key, tasks, examples}}")
    tasks, examples = value["tasks"], value.get("examples", {})
    if not isinstance(tasks, list) or not tasks or not all(isinstance(t, str) and TASK.fullmatch(t) for t in tasks):
        raise FedmtlError(f"{name}: its tasks are not names of letters, digits, `_` and `-`, one at least")
    if not isinstance(examples, dict) or not set(examples) <= {*tasks, EVERY}:
        raise FedmtlError(f"{name}: examples are bounded for tasks it is not enrolled for")
    if not all(type(most) is int and 0 < most < MOST_EXAMPLES for most in examples.values()):
        raise FedmtlError(f"{name}: a bound on examples is not a whole number above 0")
    if not isinstance(value["key"], str):
        raise FedmtlError(f"{name}: its key is no text")
    return Entry(check_public_key(value["key"].encode(), name), tuple(tasks), examples)


def _write_book(folder: Path, book: Book) -> None:
    content = {
        name: {"key": entry.key, "tasks": list(entry.tasks), "examples": dict(entry.examples)}
        for name, entry in book.items()
    }
    write_atomic(folder / BOOK, json.dumps(content, indent=1).encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two commands at once change the book one after the other."""
    with (folder / f".{BOOK}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with the file; None where there is none, zeros where it may not be looked at."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0, 0, 0
    return about.st_mtime_ns, about.st_size, about.st_ino
