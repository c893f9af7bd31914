"""One command, run to its end: its lines with their times, its memory, and how busy the machine was otherwise."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simulator.contestants.telling import FIRST
from simulator.processes import MARK, Meter, end

# Threads are set by each contestant; telemetry and updates are nobody's here.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "NO_COLOR": "1",
}


class CommandFailed(Exception):
    """A command that did not end well; its last lines say why."""


@dataclass(frozen=True)
class Outcome:
    """`lines` are (seconds since the command, text); `others` is how many cores other processes used.

    `first_batch` is when a contestant made its first batch, in seconds since the command, where it reported one.
    """

    lines: tuple[tuple[float, str], ...]
    seconds: float
    peak_mb: float
    processes: int
    others: float
    first_batch: float | None = None


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Alone on the machine, as far as others take the same lock."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str], env: Mapping[str, str], limit: float = 1800.0) -> Outcome:
    """Run a command in a new process group; nothing of it is left when this returns."""
    mark = uuid.uuid4().hex
    first = Path(tempfile.gettempdir()) / f"bench-first-{mark}"
    environment = {**os.environ, **QUIET, **env, MARK: mark, FIRST: str(first)}
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryFile("w+") as errors, Meter(mark) as meter:
        started, at = time.perf_counter(), time.time()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        # In a thread: a child that outlives the command would hold the pipe open.
        reader = threading.Thread(target=_read, args=(process, started, lines), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
            seconds = time.perf_counter() - started
        except subprocess.TimeoutExpired as late:
            raise CommandFailed(f"{' '.join(command)} did not end within {limit:g} s") from late
        finally:
            end(mark)
            process.wait()
            reader.join()
            first_batch = float(first.read_text()) - at if first.exists() else None
            first.unlink(missing_ok=True)
        errors.seek(0)
        messages = errors.read().splitlines()
    if code:
        shown = "\n".join([*(text for _, text in lines[-5:]), *messages[-15:]])
        raise CommandFailed(f"{' '.join(command)} ended with {code}:\n{shown}")
    return Outcome(tuple(lines), seconds, meter.peak_mb, meter.most_processes, meter.others, first_batch)


def _read(process: subprocess.Popen[str], started: float, lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        lines.extend((time.perf_counter() - started, line.rstrip("\n")) for line in output)
