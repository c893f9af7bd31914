"""The bytes of a model that have to be shipped, as they lie on disk and compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

# What gzip takes, and most installers.
LEVEL = 6
CHUNK = 1 << 20


def disk_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in _files(path))


def compressed_bytes(path: Path) -> int:
    """The size after zlib at level 6, the files of a folder one after another as one stream."""
    stream = zlib.compressobj(LEVEL)
    total = 0
    for file in _files(path):
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                total += len(stream.compress(chunk))
    return total + len(stream.flush())


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    else:
        yield path
