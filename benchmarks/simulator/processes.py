"""The processes of one run: found by a mark in their environment, measured while they live, ended with the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

MARK = "FEDMTL_BENCH_RUN"
TICKS = os.sysconf("SC_CLK_TCK")
EVERY = 0.15


def marked(value: str, known: dict[tuple[int, int], bool] | None = None) -> list[int]:
    """Ids of all living processes whose environment has the mark with this value, whoever their parent is now."""
    cache = {} if known is None else known
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        key = (pid, _started(pid))
        if key not in cache:
            cache[key] = f"{MARK}={value}".encode() in _read(entry / "environ").split(b"\0")
        if cache[key]:
            found.append(pid)
    return found


def end(value: str) -> None:
    """End every process with the mark: Ray's and a SuperLink's outlive the command that started them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(value):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 5
        while marked(value) and time.monotonic() < deadline:
            time.sleep(0.05)


class Meter:
    """Samples a run's processes several times a second: the peak of their summed PSS, and processor time."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: dict[tuple[int, int], bool] = {}
        self._cpu: dict[int, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_mb = 0.0
        self.most_processes = 0

    def __enter__(self) -> Meter:
        self._started, self._busy = time.perf_counter(), busy_seconds()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._started
        ours = sum(self._cpu.values())
        # Cores that other processes used meanwhile, on average: how noisy the machine was.
        self.others = max(0.0, busy_seconds() - self._busy - ours) / self.seconds

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            pids = marked(self._mark, self._known)
            self.peak_mb = max(self.peak_mb, sum(map(pss_mb, pids)))
            self.most_processes = max(self.most_processes, len(pids))
            self._cpu.update({pid: cpu_seconds(pid) for pid in pids})


def pss_mb(pid: int) -> float:
    """Memory of a process, pages it shares counted in parts (PSS); 0 where it is gone."""
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def busy_seconds() -> float:
    """Processor seconds that all cores were busy since the machine started."""
    values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / TICKS


def _started(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """The fields after the name, which may hold spaces."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
