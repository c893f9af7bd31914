"""Run folders are found and their events are read as they grow, whoever wrote them.

A run is known by an id that a scan of the folders gave it: a page never names a path. Files are opened step by step
from the folder that the user named, and no symbolic link is followed, so nothing outside of it can be read.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_json
from fedmtl.runs.event_lines import Event, NotAnEvent, from_json
from fedmtl.runs.folder import LOCK, is_busy
from fedmtl.runs.log import LARGEST_EVENTS

EVENTS, STUDY = "events.jsonl", "study.yaml"
# A scan stops after so many runs, and after so many entries of one folder.
MOST_RUNS, MOST_ENTRIES = 5_000, 50_000
# A line of a thousand tasks has less; what is longer is skipped.
LONGEST_LINE = 8 << 20
# What one poll reads at most, so that a page hears of a large file while it is read.
CHUNK = 1 << 20
# Of a folder that only others may write to, a run goes on whose last event is not older.
RECENT_SECONDS = 600.0
# The end of what was read, by which a file that was written anew is known.
_TAIL = 64
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)


@dataclass(frozen=True)
class Found:
    """A run that a scan found: `parts` lead to it from `root`; `study` is the id of the study that it is a cell of."""

    id: str
    root: Path
    parts: tuple[str, ...]
    study: str | None = None

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else self.root.name

    @property
    def path(self) -> Path:
        return self.root.joinpath(*self.parts)

    def open(self, name: str) -> int:
        """A descriptor of a regular file of the run, for reading; anything else there is an OSError."""
        return open_inside(self.root, (*self.parts, name))

    def is_busy(self) -> bool:
        """Whether a process is at work in the folder; where locks cannot be seen, whether its events just grew."""
        try:
            if not stat.S_ISREG(os.lstat(self.path / LOCK).st_mode):
                return False
            if not os.access(self.path / LOCK, os.W_OK):
                return time.time() - os.lstat(self.path / EVENTS).st_mtime < RECENT_SECONDS
        except OSError:
            return False
        return is_busy(self.path)


def open_inside(root: Path, parts: Sequence[str]) -> int:
    """Open a regular file below a folder without following a link of anybody; it is an OSError otherwise."""
    if any(part in ("", ".", "..") or "/" in part or os.sep in part or "\0" in part for part in parts):
        raise OSError("not a name of a file")
    folder: int | None = None
    try:
        for index, part in enumerate(("", *parts)):
            is_last = index == len(parts)
            flags = os.O_RDONLY | (_NO_FOLLOW if index else 0) | (0 if is_last else _FOLDER)
            if os.open in os.supports_dir_fd:
                inner = os.open(part or root, flags, dir_fd=folder if index else None)
            else:
                path = root.joinpath(*parts[:index])
                if index and path.is_symlink():
                    raise OSError(f"{path}: is a link")
                if not is_last:
                    continue
                inner = os.open(path, flags)
            if folder is not None:
                os.close(folder)
            folder = inner
        assert folder is not None
        if not stat.S_ISREG(os.fstat(folder).st_mode):
            raise OSError("is no regular file")
        found, folder = folder, None
        return found
    finally:
        if folder is not None:
            os.close(folder)


def scan(roots: Sequence[Path]) -> tuple[list[Found], dict[str, Found]]:
    """The runs below these folders, and the studies by id.

    A root may be a run or a study itself. Of a folder of runs, its runs are found, and of a study in it the cells;
    nothing lies deeper.
    """
    runs: list[Found] = []
    studies: dict[str, Found] = {}
    for index, root in enumerate(roots):
        top = Found(f"{index}", root, ())
        if _is_file(root / EVENTS) or _is_file(root / "config.yaml"):
            runs.append(top)
            continue
        for folder in (top, *_folders(top)):
            if len(runs) >= MOST_RUNS:
                break
            if folder.parts and (_is_file(folder.path / EVENTS) or _is_file(folder.path / "config.yaml")):
                runs.append(folder)
            elif _is_file(folder.path / STUDY) and _is_folder(folder.path / "cells"):
                studies[folder.id] = folder
                cells = Found(f"{folder.id}/cells", root, (*folder.parts, "cells"))
                runs += [
                    Found(cell.id, root, cell.parts, folder.id)
                    for cell in _folders(cells)
                    if _is_file(cell.path / EVENTS) or _is_file(cell.path / "config.yaml")
                ]
    return runs[:MOST_RUNS], studies


def _folders(parent: Found) -> Iterator[Found]:
    """The folders in a folder, by name; links and hidden ones are left out."""
    try:
        with os.scandir(parent.path) as entries:
            names = [
                entry.name
                for _, entry in zip(range(MOST_ENTRIES), entries, strict=False)
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return
    for name in sorted(names):
        yield Found(f"{parent.id}/{name}", parent.root, (*parent.parts, name))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


class Tail:
    """Reads the whole lines of a growing events.jsonl, each once, from where the last call ended.

    A line that was cut off while written is read when the rest of it is there. After a file was replaced or cut back,
    as a resume does, `read` begins anew, and says so.
    """

    def __init__(self, run: Found) -> None:
        self._run = run
        self.offset = self.size = 0
        self.is_there = True
        self.is_too_large = False
        self.num_broken = 0
        self.broken: list[tuple[int, str]] = []
        self._number = 0
        self._stamp: tuple[int, int, int] | None = None
        self._file: tuple[int, int] | None = None
        self._last = b""
        self._is_inside_long_line = False

    @property
    def is_behind(self) -> bool:
        """Whether the next call has more to read at once."""
        return not self.is_too_large and self._stamp is None and self.is_there

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether everything begins anew, and the next lines; none where nothing has changed."""
        try:
            descriptor = self._run.open(EVENTS)
        except OSError:
            was_there, self.is_there = self.is_there, False
            return was_there and self.offset > 0 and self._begin_anew(), []
        self.is_there = True
        try:
            about = os.fstat(descriptor)
            stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
            if stamp == self._stamp:
                return False, []
            is_new = self._is_other(descriptor, about) and self._begin_anew()
            self._file, self.size = (about.st_dev, about.st_ino), about.st_size
            self.is_too_large = about.st_size > LARGEST_EVENTS
            if self.is_too_large:
                self._stamp = stamp
                return is_new, []
            data = _read_at(descriptor, self.offset, CHUNK)
            if b"\n" not in data and len(data) == CHUNK:
                data += _read_at(descriptor, self.offset + len(data), LONGEST_LINE)
            self._stamp = stamp if self.offset + len(data) >= about.st_size else None
            return is_new, self._lines(data)
        finally:
            os.close(descriptor)

    def _begin_anew(self) -> bool:
        self.offset, self._number, self._last, self._stamp = 0, 0, b"", None
        self.num_broken, self.broken, self._is_inside_long_line = 0, [], False
        return True

    def _is_other(self, descriptor: int, about: os.stat_result) -> bool:
        """Whether the file is another one than what was read so far is the beginning of."""
        if not self.offset:
            return False
        if self._file != (about.st_dev, about.st_ino) or about.st_size < self.offset:
            return True
        return _read_at(descriptor, self.offset - len(self._last), len(self._last)) != self._last

    def _lines(self, data: bytes) -> list[bytes]:
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) <= LONGEST_LINE:
                return []
            # Nothing of ours is so long: skip to its end.
            self.offset, self._last, self._is_inside_long_line = self.offset + len(data), data[-_TAIL:], True
            return []
        self.offset += end
        self._last = (self._last + data[max(0, end - _TAIL) : end])[-_TAIL:]
        lines = data[:end].split(b"\n")[:-1]
        if self._is_inside_long_line:
            self._is_inside_long_line = False
            lines[0] = b"?"
        return lines

    def events(self, lines: Sequence[bytes], skip: tuple[bytes, ...] = ()) -> Iterator[Event]:
        """The events of lines that were read; those that begin with one of `skip` are left out unread.

        A line that is no event is counted in `num_broken`, and the first of them are in `broken`.
        """
        for line in lines:
            self._number += 1
            if skip and line.startswith(skip):
                continue
            if not line.strip():
                continue
            event = read_event(line)
            if isinstance(event, Event):
                yield event
                continue
            self.num_broken += 1
            if len(self.broken) < 5:
                self.broken.append((self._number, event))


def read_event(line: bytes) -> Event | str:
    """The event of a line, or what is wrong with it."""
    if len(line) > LONGEST_LINE:
        return "is too long"
    try:
        return from_json(parse_json(line, "", ""))
    except NotAnEvent as mistake:
        return str(mistake)
    except FedmtlError:
        return "is not JSON"


def _read_at(descriptor: int, offset: int, most: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts = []
    while most > 0 and (data := os.read(descriptor, most)):
        parts.append(data)
        most -= len(data)
    return b"".join(parts)
