"""Sends a run's events to a tracker: once, by `fedmtl track`, or beside the run, in a process of its own.

A tracker's run has an id that lies in the run folder, and before anything is sent the tracker's store says what it has
already. So it does not matter how often a run is sent, or when one of the two processes was killed: there is one run,
and no step twice. A process of its own cannot slow a run by more than its share of a core, and cannot end it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from fedmtl.errors import FedmtlError
from fedmtl.foreign import read_json
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import EndEvent, RoundEvent
from fedmtl.runs.folder import RunFolder, is_busy, locked, make_private_folder, write_atomic
from fedmtl.runs.log import Trouble
from fedmtl.trackers.points import SentOptions, Tail, artifacts_of

FOLDER = "trackers"
POLL_SECONDS = 0.5
# After a failure it is tried again, twice as late each time.
FIRST_WAIT, LONGEST_WAIT = 2.0, 120.0
# So long a run that is over waits for its trackers; then they go on by themselves.
LAST_SECONDS = 30.0
# What libraries would send or store of the machine by default.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


class Destination(Protocol):
    """One run in a tracker's store, opened by its id: the one that is there, or a new one."""

    def logged(self) -> Mapping[int, Collection[str]]:
        """The names of the metrics that the store has, by step."""
        ...

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Store the run's config and what else is known from its start; the same facts again change nothing."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step, which the store does not have; steps come in their order."""
        ...

    def store(self, name: str, path: Path) -> None:
        """Store a file or a folder under a name."""
        ...

    def finish(self, status: str, summary: Mapping[str, float | str], step: int) -> None:
        """Say how the run ended, after `step`; the same summary again changes nothing."""
        ...

    def close(self) -> None:
        """Write out what is left; everything is in the store when this returns."""
        ...


class OpenDestination(Protocol):
    def __call__(self, options: Any, run: RunFolder, id: str) -> Destination: ...


@dataclass(frozen=True)
class Sent:
    """What lies in `trackers/NAME.json`: the id of the run there, digests of stored files, and the last failure."""

    id: str
    artifacts: dict[str, str] = field(default_factory=dict)
    error: str | None = None


class Sender:
    """One run on its way to one tracker; `send` may be called at any time, and sends what is new."""

    def __init__(self, run: RunFolder, name: str, options: SentOptions, opener: OpenDestination) -> None:
        self._run, self._options, self._opener = run, options, opener
        self._path = run.path / FOLDER / f"{name}.json"
        self.tail = Tail(run, with_clients=options.clients)
        self._destination: Destination | None = None
        self._logged: dict[int, set[str]] = {}
        self._described: Mapping[str, Any] | None = None
        self.sent = _read(self._path)

    def send(self) -> int:
        """Send the rounds that are new, and what belongs to the end where there is one; returns how many rounds."""
        self.tail.read()
        book = self.tail.book
        if not book.facts:
            return 0
        if self._destination is None:
            self._open()
        destination = self._destination
        assert destination is not None
        if book.facts != self._described:
            destination.describe(book.facts)
            self._described = json.loads(json.dumps(book.facts))
        number = 0
        for point in self.tail.final_points():
            new = {name: value for name, value in point.metrics.items() if name not in self._logged.get(point.step, ())}
            if new:
                destination.log(point.step, new)
                self._logged.setdefault(point.step, set()).update(new)
                number += 1
        self._note(replace(self.sent, error=None))
        return number

    def close(self) -> None:
        """Leave a run that somebody is at work on, with all that was sent in the store."""
        destination, self._destination = self._destination, None
        if destination is not None:
            destination.close()

    def finish(self) -> None:
        """Send what is left of a run that nobody works on any more, its files too, and close it."""
        self.send()
        book, destination = self.tail.book, self._destination
        if destination is None:
            return
        for name, path in artifacts_of(self._run, self._options).items():
            digest = _digest(path)
            if self.sent.artifacts.get(name) != digest:
                destination.store(name, path)
                self._note(replace(self.sent, artifacts={**self.sent.artifacts, name: digest}))
        destination.finish(book.status or "interrupted", book.summary, max(book.points, default=0))
        self.close()

    def fail(self, error: Exception) -> str:
        """Note a failure, and give the destination up: the next `send` opens it anew."""
        destination, self._destination, self._described = self._destination, None, None
        with suppress(Exception):
            if destination is not None:
                destination.close()
        words = _words(error)
        self._note(replace(self.sent, error=words))
        return words

    def _open(self) -> None:
        if not self.sent.id:
            # Before the tracker hears of it: a kill in between would leave a second run there.
            self._note(Sent(id=secrets.token_hex(8)))
        self._destination = self._opener(self._options, self._run, self.sent.id)
        self._logged = {step: set(names) for step, names in self._destination.logged().items()}

    def _note(self, sent: Sent) -> None:
        if sent != self.sent or not self._path.exists():
            write_atomic(self._path, json.dumps(asdict(sent)).encode())
            self.sent = sent


def _read(path: Path) -> Sent:
    """What was noted of an earlier sending; anything else in its place is as if there had been none."""
    if not path.exists():
        return Sent(id="")
    found = read_json(path, "delete it: the run is sent anew, as another one")
    known = found if isinstance(found, dict) else {}
    id, artifacts, error = known.get("id"), known.get("artifacts"), known.get("error")
    if not isinstance(id, str) or not isinstance(artifacts, dict):
        raise FedmtlError(f"{path}: is not what fedmtl writes there; delete it: the run is sent anew, as another one")
    return Sent(id, {str(name): str(digest) for name, digest in artifacts.items()}, str(error) if error else None)


def _digest(path: Path) -> str:
    """A digest of a file, or of all files of a folder with their names."""
    digest = hashlib.sha256()
    files = sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _words(error: Exception) -> str:
    # Before it is cut, which could leave a password without the sign that ends it.
    first = next(iter(_without_secrets(str(error)).strip().splitlines()), "")[:300]
    return first if isinstance(error, FedmtlError) else f"{type(error).__name__}: {first}"


def _without_secrets(text: str) -> str:
    """A message without what stands before the host in an address: of MLFLOW_TRACKING_URI that may be a password."""
    return re.sub(r"://[^\s\"'<>]*@", "://...@", text)


def send_once(run: RunFolder, name: str, options: SentOptions, opener: OpenDestination) -> int:
    """Send all that a run has written so far, and return how many rounds were new there."""
    make_private_folder(run.path / FOLDER)
    # Before the library is imported, which reads them then.
    os.environ.update(QUIET)
    with locked(run.path / FOLDER, f".{name}.lock"):
        sender = Sender(run, name, options, opener)
        try:
            number = sender.send()
            if is_busy(run.path):
                sender.close()
            else:
                sender.finish()
        except Exception as error:
            words = sender.fail(error)
            if isinstance(error, FedmtlError):
                raise
            raise FedmtlError(f"{name}: {words}; see docs/trackers.md") from error
        return number


def follow(run: RunFolder, name: str, options: SentOptions, opener: OpenDestination, over: threading.Event) -> None:
    """Send a run's rounds as they come, until it is `over`; after a failure it is tried again later.

    The last try comes when the run is over, and what it lacks then, `fedmtl track` sends.
    """
    sender = Sender(run, name, options, opener)
    wait, not_before = FIRST_WAIT, 0.0
    while not over.wait(POLL_SECONDS):
        if time.monotonic() < not_before:
            continue
        try:
            sender.send()
            wait = FIRST_WAIT
        except Exception as error:
            sender.fail(error)
            not_before, wait = time.monotonic() + wait, min(2 * wait, LONGEST_WAIT)
    try:
        sender.finish()
    except Exception as error:
        sender.fail(error)
        raise


class Follower:
    """A run's side of `follow`: it starts the process, and says once where that failed; the run goes on."""

    def __init__(self, folder: Path, name: str, missing: str | None) -> None:
        self._run, self._name, self._missing = RunFolder(folder), name, missing
        self._said = False
        self._until = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        if missing is None:
            self._start()

    def _start(self) -> None:
        make_private_folder(self._run.path / FOLDER)
        write_error(self._run, self._name, None)
        # In a session of its own: Ctrl-C ends the run, and what it came to is still to be sent.
        descriptor = os.open(self._file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._run.path.absolute()), self._name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        _STARTED.append(self)

    def event(self, event: Event) -> None:
        """Raise Trouble, once, where the process ended or noted a failure; it is looked for after every round."""
        if self._said or not (self._missing or isinstance(event, RoundEvent | EndEvent)):
            return
        error = self._missing or _noted_error(self._file("json"))
        if error is None and self._process is not None and self._process.poll() is not None:
            error = f"its process ended; {self._file('log')} says why"
        if error is not None:
            self._said = True
            raise Trouble(f"{error}; {self._remedy()}")

    def close(self) -> None:
        """Say to the process that the run is over, and wait a while for what is on its way, unless it failed before."""
        if self._process is None:
            return
        # All trackers of the run learn of its end now, so the run waits for them together.
        for follower in _STARTED:
            if follower._run.path == self._run.path:
                follower._let_go()
        if self._said:
            return
        try:
            code = self._process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Trouble(f"is still sending, and goes on by itself; {self._remedy()}") from None
        error, ended = _noted_error(self._file("json")), f"its process ended; {self._file('log')} says why"
        if code or error:
            raise Trouble(f"{error or ended}; {self._remedy()}")

    def _let_go(self) -> None:
        # This end of the pipe is how the process learns that nobody works on the run, however that came about.
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        self._until = time.monotonic() + LAST_SECONDS
        with suppress(OSError):
            self._process.stdin.close()

    def _remedy(self) -> str:
        where = self._run.name if self._run.path.parent == Path("runs") else self._run.path
        return f"`fedmtl track {where} --to {self._name}` sends what is missing"

    def _file(self, kind: str) -> Path:
        return self._run.path / FOLDER / f"{self._name}.{kind}"


# They may go on when their run is over, so nobody waits for them.
_STARTED: list[Follower] = []


def write_error(run: RunFolder, name: str, error: str | None) -> None:
    """Note a failure of a tracker in the run folder, or that there is none now."""
    path = run.path / FOLDER / f"{name}.json"
    known = _read(path)
    if known.error != error:
        write_atomic(path, json.dumps(asdict(replace(known, error=error))).encode())


def _noted_error(path: Path) -> str | None:
    try:
        return _read(path).error
    except FedmtlError:
        return None


def _main(folder: str, name: str) -> None:
    """The process beside a run; its standard input is closed when the run is over, or its process gone."""
    from fedmtl.capabilities import tracker_opener, tracker_options
    from fedmtl.config.file import load_config

    with suppress(OSError, AttributeError):
        os.nice(10)
    run, over = RunFolder(Path(folder)), threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    options = tracker_options(load_config(run.config), name)
    for _ in range(int(LAST_SECONDS)):
        try:
            with locked(run.path / FOLDER, f".{name}.lock"):
                follow(run, name, options, tracker_opener(name), over)
            return
        except FedmtlError as error:
            # The process of the session before may still be at its last round.
            if "another process is at work" not in str(error):
                raise
            time.sleep(1.0)
    write_error(run, name, "another process sends this run")
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:3])
    except Exception:
        # It goes to NAME.log in the run folder.
        print(_without_secrets(traceback.format_exc()), file=sys.stderr)
        raise SystemExit(1) from None
