"""A site's record of every message in and out: kinds, sizes, counts and hashes, never a text, a label or a path.

Each line of `audit.jsonl` holds the sha256 of the line before it, so a line that is changed, removed or put in between
breaks the chain. Lines cut off at the end leave a shorter chain that is whole: note the last hash elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.federation.faults import is_safe_name

NAME = "audit.jsonl"
START = "0" * 64
# A frame's first bytes, as `federation/wire/frame.py` packs them; that module loads torch, which the line does without.
HEAD = struct.Struct("<4sBxxxIQI")
MAGIC = b"FMTL"
MAX_HEADER, MAX_INFLATION = 1 << 25, 64
MOST_TASKS = 1000
# A line has a thousand names of tasks at the very most.
MAX_LINE = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """What a chain is found to be: its whole lines, the hash of the last, and what is wrong with it, if anything.

    `cuts` are lines that were cut off while being written, after which the site went on, or the last one.
    """

    lines: int
    last: str
    broken: str | None
    cuts: tuple[int, ...] = ()


class Audit:
    """Appends to a site's chain; a line is on the disk when `record` returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._previous, self._number = self._resume()

    def record(self, way: str, kind: str, content: bytes | Path, **facts: Any) -> int:
        """Add one message, and give its number; `way` is `in` or `out`, `content` the bytes or a file of them."""
        entry = {
            "number": self._number,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "way": way,
            "kind": kind,
            **_measured(content),
            **facts,
            "previous": self._previous,
        }
        line = json.dumps(entry, separators=(",", ":")).encode()
        self._append(line + b"\n")
        self._previous, self._number = _sha256(line), self._number + 1
        return self._number - 1

    def _append(self, data: bytes) -> None:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                while data:
                    data = data[os.write(file, data) :]
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise FedmtlError(
                f"{self._path}: cannot be written ({error.strerror}); without its record this site does not take part"
            ) from error

    def _resume(self) -> tuple[str, int]:
        """The hash of the last line and the next number; a line that was cut is ended, and stays in the chain."""
        if not self._path.exists():
            return START, 1
        if not self._path.is_file():
            raise FedmtlError(f"{self._path}: is no file; without its record this site does not take part")
        previous, number, is_cut = START, 0, False
        for line, is_whole in _lines(self._path):
            if len(line) > MAX_LINE:
                raise FedmtlError(f"{self._path}: line {number + 1} is longer than any that a site writes; move the"
                                  " file away and find out who wrote it")  # fmt: skip
            previous, number, is_cut = _sha256(line), number + 1, not is_whole
        if is_cut:
            self._append(b"\n")
        return previous, number + 1


def verify(path: Path) -> Verdict:
    """Follow a chain from its first line to its last."""
    previous, number = START, 0
    cuts: list[int] = []
    for number, (line, is_whole) in enumerate(_lines(_found(path)), start=1):
        if len(line) > MAX_LINE:
            return Verdict(number - 1, previous, f"line {number} is longer than any that a site writes", tuple(cuts))
        entry = _entry(line)
        if entry is None:
            # Its hash decides below: only a line that the site itself went on from is in the next one.
            cuts.append(number)
        elif entry.get("number") != number or entry.get("previous") != previous:
            return Verdict(number - 1, previous, _why_broken(entry, number), tuple(cuts))
        elif not is_whole:
            cuts.append(number)
        previous = _sha256(line)
    return Verdict(number, previous, None, tuple(cuts))


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that can be read, in order."""
    for line, _ in _lines(_found(path)):
        entry = _entry(line) if len(line) <= MAX_LINE else None
        if entry is not None:
            yield entry


def describe_frame(path: Path) -> dict[str, Any]:
    """Kind, round, tasks and numbers of values of a job's or an update's frame; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            magic, _, length, _, _ = HEAD.unpack(file.read(HEAD.size))
            if magic != MAGIC or length > MAX_HEADER:
                return {}
            deflated = file.read(length)
        header = json.loads(zlib.decompressobj().decompress(deflated, min(MAX_HEADER, MAX_INFLATION * length)))
        shapes = [entry[4] for entry in header["tensors"]]
        return {
            "job": header.get("kind") if header.get("kind") in ("train", "evaluate", "exchange") else None,
            "round": header["round"] if type(header["round"]) is int else None,
            "tasks": [task if is_safe_name(str(task)) else "?" for task in header["tasks"][:MOST_TASKS]],
            "tensors": len(shapes),
            "values": sum(_product(shape) for shape in shapes),
        }
    except (OSError, struct.error, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 40:
            raise ValueError("no shape")
        total = min(total * size, 1 << 62)
    return total


def _measured(content: bytes | Path) -> dict[str, Any]:
    if isinstance(content, bytes):
        return {"bytes": len(content), "sha256": _sha256(content)}
    with content.open("rb") as file:
        return {"bytes": content.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _found(path: Path) -> Path:
    found = path / NAME if path.is_dir() else path
    if not found.is_file():
        raise FedmtlError(f"{found}: no such file; name a site's folder, such as sites/NAME")
    return found


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Every line without its end, and whether it has one; one longer than MAX_LINE is the last, and not whole."""
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 2):
                text = line.removesuffix(b"\n")
                yield text, line.endswith(b"\n")
                if len(text) > MAX_LINE:
                    return
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror})") from error


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _why_broken(entry: dict[str, Any], number: int) -> str:
    found = entry.get("number")
    if type(found) is int and found > number:
        return f"line {number} is number {found}: {found - number} lines before it are missing"
    if found != number:
        return f"line {number} is not number {number}: it was put there, or one before it was changed"
    return f"line {number} does not follow from line {number - 1}: that one, or this one, was changed"
