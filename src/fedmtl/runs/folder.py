"""A run folder has fixed files, a lock, events and a table of rounds, as docs/run-folder.md lays down."""

from __future__ import annotations

import csv
import difflib
import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.errors import FedmtlError, RunNotFound
from fedmtl.foreign import parse_json
from fedmtl.runs.events import event_mistake

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Of the kinds of tasks in the package; others name theirs in the `start` event.
METRICS = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman", "mse", "rmse", "mae", "r2"),
}
_ROUND_COLUMNS = (
    "round",
    "overall",
    "classification",
    "clients",
    "failures",
    "bytes_up",
    "bytes_down",
    "seconds",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# A million updates are 300 MB; a reader holds all of them, some times larger.
LARGEST_EVENTS = 2 << 30
LOCK = ".lock"

Event = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Where each part of one run lies; a part need not exist yet."""

    path: Path

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
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def spool(self) -> Path:
        """Encoded updates of the open round; empty between rounds."""
        return self.path / "spool"


def create_run(output: Path, name: str) -> RunFolder:
    """A new, empty folder of that name, or of name-2, name-3, ... where it is taken; never an old one.

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
        while True:
            try:
                path.mkdir(mode=0o700)
                return RunFolder(path)
            except FileExistsError:
                number += 1
                path = output / f"{name}-{number}"
    except OSError as error:
        raise _storage_error(error, output) from error


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
        raise _storage_error(error, folder) from error
    try:
        if not _lock(descriptor):
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() if hasattr(os, "pread") else ""
            who = f" (process {holder})" if holder.isdigit() else ""
            raise FedmtlError(f"{folder}: another process is at work in it{who}; wait until it ends, or end it first")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether the open file is ours alone now; on a file system that knows no locks it is taken to be."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def find_run(name_or_folder: str, output: Path = Path("runs")) -> RunFolder:
    """The run of that name under `output`, or in that folder."""
    for path in (output / name_or_folder, _expanded(name_or_folder)):
        if _is_run(path):
            return RunFolder(path)
    if not output.is_dir():
        raise RunNotFound(f"{name_or_folder}: no such run, and no folder {output}; start one with `fedmtl run`")
    known = sorted(path.name for path in output.iterdir() if _is_run(path))
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


def append_event(run: RunFolder, event: Mapping[str, Any]) -> None:
    """Add one line to events.jsonl; it is in the file when this returns. NaN and infinity become null."""
    _append(run.events, _line(event))


def read_events(run: RunFolder) -> list[Event]:
    """The run's events in order, each as `event_schema` says; a last line that was cut off while written is left out.

    A line that is broken otherwise is an error whose advice, `--repair`, is `repair_events`.
    """
    events: list[Event] = []
    for number, event, mistake in _lines(run):
        if mistake is not None:
            raise FedmtlError(f"{run.events}, line {number}: {mistake}; {repair_advice(run)}")
        events.append(event)
    return events


def repair_advice(run: RunFolder) -> str:
    """What to do about a broken events.jsonl, as part of a message."""
    command = "fedmtl server" if (run.path / "place.json").exists() else "fedmtl run"
    where = run.name if run.path.parent == Path("runs") else run.path
    return f"put back a copy of the file, or leave its broken lines out with `{command} --resume {where} --repair`"


def repair_events(run: RunFolder) -> list[int]:
    """Leave out the lines that cannot be read, and return their numbers; the file as it was stays beside it."""
    kept: list[Event] = []
    broken: list[int] = []
    for number, event, mistake in _lines(run):
        if mistake is None:
            kept.append(event)
        else:
            broken.append(number)
    if broken:
        number = 1
        while (copy := run.path / f"events.jsonl.broken-{number}").exists():
            number += 1
        shutil.copyfile(run.events, copy)
        copy.chmod(0o600)
        write_events(run, kept)
    return broken


def missing_rounds(events: Iterable[Mapping[str, Any]], last: int) -> list[int]:
    """The rounds from 0 to `last` that no `round` event closes."""
    closed = {event["round"] for event in events if event["event"] == "round"}
    return [number for number in range(last + 1) if number not in closed]


def _lines(run: RunFolder) -> Iterator[tuple[int, Event, str | None]]:
    """Every line's number, its event, and what is wrong with it."""
    if not run.events.exists():
        return
    if run.events.stat().st_size > LARGEST_EVENTS:
        raise FedmtlError(f"{run.events}: has more than {LARGEST_EVENTS >> 30} GB, which no run writes")
    lines = run.events.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_json(line, "", "")
        except FedmtlError:
            if number < len(lines) or not _is_cut(line):
                yield number, {}, "is not JSON"
            continue
        yield number, event, event_mistake(event)


def _is_cut(line: bytes) -> bool:
    """Whether a line that is not JSON may be the beginning of one of ours."""
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def write_events(run: RunFolder, events: Iterable[Mapping[str, Any]]) -> None:
    """Put events.jsonl in place whole."""
    write_atomic(run.events, b"".join(map(_line, events)))


def cut_back(run: RunFolder, round: int) -> None:
    """Drop what events.jsonl and results.csv say of later rounds and of the end, as if they never were."""
    kept = [e for e in read_events(run) if e["event"] != "end" and e.get("round", -1) <= round]
    write_events(run, kept)
    if any(event["event"] == "start" for event in kept):
        write_atomic(run.results, results_table(kept).encode())


def append_results(run: RunFolder, events: Sequence[Mapping[str, Any]]) -> None:
    """Add a round's row to results.csv, from its `round` and `evaluation` events.

    The first row comes with the header, which needs the `start` event in events.jsonl.
    """
    columns, header = _columns(run), ""
    if columns is None:
        columns = result_columns(read_events(run))
        header = _csv_line(columns)
    _append(run.results, (header + _csv_line(results_row(events, columns))).encode())


def _columns(run: RunFolder) -> list[str] | None:
    """The header of results.csv; None where there is none yet."""
    try:
        with run.results.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), None)
    except FileNotFoundError:
        return None
    except (csv.Error, UnicodeDecodeError) as error:
        raise FedmtlError(f"{run.results}: is not our table; delete it, the next resume writes it anew") from error


def results_table(events: Sequence[Mapping[str, Any]]) -> str:
    """The whole of results.csv, from the events of a run."""
    columns = result_columns(events)
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["event"] in ("round", "evaluation"):
            by_round.setdefault(event["round"], []).append(event)
    closed = [own for own in by_round.values() if any(event["event"] == "round" for event in own)]
    return _csv_line(columns) + "".join(_csv_line(results_row(own, columns)) for own in closed)


def result_columns(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of results.csv: fixed by the tasks of the `start` event."""
    start = next((event for event in events if event["event"] == "start"), None)
    if start is None:
        raise FedmtlError("events.jsonl: has no `start`, which says what was run; put back a copy of the file")
    columns = list(_ROUND_COLUMNS)
    for name, task in start.get("tasks", {}).items():
        columns += [f"{name}.{metric}" for metric in task_metrics(task)] + [f"{name}.train_loss"]
    return columns


def task_metrics(about: Mapping[str, Any]) -> Sequence[str]:
    """The metrics of a task by what `start` says of it; one of a kind that is not in the package names them."""
    return METRICS.get(about.get("kind", ""), about.get("metrics") or ())


def results_row(events: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """One round's values in the order of the columns; undefined and not evaluated are empty."""
    values: dict[str, Any] = {}
    for event in events:
        if event["event"] == "round":
            values |= {name: event.get(name) for name in _ROUND_COLUMNS}
            values |= {f"{task}.train_loss": loss for task, loss in event.get("losses", {}).items()}
        elif event["event"] == "evaluation":
            values |= {f"{event['task']}.{metric}": value for metric, value in event["metrics"].items()}
    plain = _plain(values)
    return ["" if plain.get(column) is None else str(plain[column]) for column in columns]


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Put a file of these parts in place whole or not at all, whatever happens; its folder is made where missing.

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
        raise _storage_error(error, path.parent) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _append(path: Path, data: bytes) -> None:
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
        raise _storage_error(error, path.parent) from error


def _storage_error(error: OSError, folder: Path) -> FedmtlError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FedmtlError(f"{folder}: no space left on its disk; free some, or set `output` to another disk")
    reason = error.strerror or str(error)
    return FedmtlError(f"{folder}: cannot be written ({reason}); set `output` to a folder you can write to")


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(event), allow_nan=False).encode() + b"\n"


def _csv_line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """The same value in JSON's types; numpy's scalars and arrays by their `tolist`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
