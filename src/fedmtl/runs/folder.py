"""A run folder has fixed files, as docs/run-folder.md lays down; a run is found by its name or its folder.

Files are written whole or not at all, folders are private, and one process at a time is at work in a folder.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedmtl.errors import FedmtlError, RunNotFound

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
# What `write_atomic` and `create_run` work on before it has its name.
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
UNFINISHED_SECONDS = 60.0
# Of Linux' renameat2.
AT_FDCWD, RENAME_NOREPLACE = -100, 1


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it, that only its owner may open; one that is there is closed to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Have a folder to oneself: a second process that asks for it gets an error of one line.

    The lock belongs to the open file, so it ends with the process, however that ends; the file itself stays and says
    nothing. Child processes do not inherit it.
    """
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise storage_error(error, folder) from error
    try:
        if _lock(descriptor) is False and _lock_later(descriptor) is False:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() if hasattr(os, "pread") else ""
            who = f" (process {holder})" if holder.isdigit() else ""
            raise FedmtlError(f"{folder}: another process is at work in it{who}; wait until it ends, or end it first")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _lock_later(descriptor: int) -> bool | None:
    """Try once more: `is_busy` has the lock for the moment that it looks."""
    time.sleep(0.05)
    return _lock(descriptor)


def is_busy(folder: Path, name: str = LOCK) -> bool:
    """Whether a process of this machine is at work in a folder; one that was killed is not."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR)
    except OSError:
        return False
    try:
        # Without locks nobody knows, and a run that goes on is the likelier one.
        return _lock(descriptor) is not True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the open file is ours alone now; None on a file system that knows no locks."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP) else False
    return True


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of these parts whole or not at all, whatever happens; its folder is made where missing.

    Only its owner may read it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, path.parent) from error


def append_bytes(path: Path, data: bytes) -> None:
    """Add to the end of a file, all of the data or none of it; only its owner may read the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            except OSError:
                # Half a line would glue itself to the next one.
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path.parent) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, folder: Path) -> FedmtlError:
    """The error of one line for a folder that cannot be written to, with the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FedmtlError(f"{folder}: no space left on its disk; free some, or set `output` to another disk")
    reason = error.strerror or str(error)
    return FedmtlError(f"{folder}: cannot be written ({reason}); set `output` to a folder you can write to")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RunFolder:
    """Where each part of one run lies; a part need not exist yet.

    `model_folder` is that of another round's model, instead of the one that the run ended with.
    """

    path: Path
    model_folder: Path | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.csv"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def clients(self) -> Path:
        return self.path / "clients"

    @property
    def model(self) -> Path:
        return self.model_folder or self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def test_scores(self) -> Path:
        """What `fedmtl evaluate --test` found, for the cards of exports."""
        return self.path / "test-scores.json"

    @property
    def spool(self) -> Path:
        """Encoded updates of the open round; empty between rounds."""
        return self.path / "spool"


def create_run(
    output: Path, name: str, files: Callable[[RunFolder], Mapping[str, bytes]] = lambda run: {}
) -> RunFolder:
    """A new folder of that name, or of name-2, name-3, ... where it is taken; never an old one.

    It has these files from the moment it is there: whatever ends the process, there is no folder without a config.
    Only its owner may open it: it will hold weights, and what sites said.
    """
    if not _NAME.fullmatch(name):
        raise FedmtlError(
            f"run name {name[:120]!r}: use letters, digits, `.`, `_` and `-`, 100 at most, and start with a letter"
            " or a digit"
        )
    path, number = output / name, 1
    try:
        output.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(output)
        while not _appears(path, files(RunFolder(path))):
            number += 1
            path = output / f"{name}-{number}"
        return RunFolder(path)
    except OSError as error:
        raise storage_error(error, output) from error


def _appears(path: Path, files: Mapping[str, bytes]) -> bool:
    """Make a folder with these files in one step; False where there is something of that name."""
    if not files:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        return True
    if path.exists():
        return False
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        hidden.mkdir(mode=0o700)
        # While it has the lock, no other start takes the folder for one that a kill left behind.
        with locked(hidden):
            for name, data in files.items():
                write_atomic(hidden / name, data)
            try:
                _rename_to_new(hidden, path)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    return False
                raise
        _sync_folder(path.parent)
        return True
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _rename_to_new(folder: Path, target: Path) -> None:
    """Give a folder its name; where there is something of that name, were it an empty folder, it is an OSError."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is not None:
            if rename(AT_FDCWD, os.fsencode(folder), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE) == 0:
                return
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number), str(target))
    # An empty folder that came in between would be replaced here, one with files in it not.
    folder.rename(target)


def _remove_unfinished(output: Path) -> None:
    """Remove the hidden folders of starts that were killed; one that a process works on stays.

    A start needs milliseconds, so a folder of the last minute may be somebody's who has no lock yet. A folder of such
    a name with anything in it that a start does not write is somebody else's.
    """
    for folder in output.glob(".*.tmp"):
        if not _UNFINISHED.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        # Another process may give it its name, or remove it, at any time.
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > UNFINISHED_SECONDS
            if is_old and _is_of_a_start(folder) and not is_busy(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_of_a_start(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    return all(name in (LOCK, "config.yaml") or _UNFINISHED.fullmatch(name) for name in names)


def remove_temporary(run: RunFolder) -> None:
    """Remove the unfinished files of a process that was killed while it wrote; call it with the run's lock."""
    for folder in (run.path, run.checkpoints, run.path / "model"):
        for path in folder.glob(".*.tmp"):
            if _UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)
    # The encoder's folder is written under such a name, too.
    for path in (run.path / "model").glob(".encoder.*.tmp"):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def find_run(name_or_folder: str, output: Path = Path("runs")) -> RunFolder:
    """The run of that name under `output`, or in that folder."""
    for path in (output / name_or_folder, _expanded(name_or_folder)):
        if _is_run(path):
            return RunFolder(path)
    if not output.is_dir():
        raise RunNotFound(f"{name_or_folder}: no such run, and no folder {output}; start one with `fedmtl run`")
    known = sorted(path.name for path in output.iterdir() if not path.name.startswith(".") and _is_run(path))
    near = difflib.get_close_matches(name_or_folder, known, n=3)
    if near:
        raise RunNotFound(f"{name_or_folder}: no such run in {output}; did you mean {' or '.join(near)}?")
    listed = f"it has {', '.join(known[:10])}{', ...' if len(known) > 10 else ''}" if known else "it has none"
    raise RunNotFound(f"{name_or_folder}: no such run in {output}, {listed}; give a name or a run folder")


def _expanded(name: str) -> Path:
    """The path with `~` replaced; it stays where that user has no home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "events.jsonl").is_file()
