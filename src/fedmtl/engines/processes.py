"""The processes of a run: workers of one thread each that keep their model between calls, and signals as exceptions.

Batches of many sizes leave glibc's heap full of holes, which it does not return by itself, so workers trim it.
Loads no numeric library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from fedmtl.errors import CannotContinue, FedmtlError
from fedmtl.timing import part, timed

# Returned pages cost a little when they are needed again, so that it is done only when there are many.
GROWTH = 64 << 20
# Set for the workers before any numeric library loads: one thread per process, and no idle pools of them.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# The operating system takes no wait of years.
LONGEST_WAIT = 3600.0
# How often the start of a process is tried.
STARTS = 3
Handler = Callable[[Any], Any]
Start = Callable[[Any], Handler]


def heap_trimmer(growth: int = GROWTH) -> Callable[[], None]:
    """A function to call between jobs: trims the heap where it grew by that many bytes since it was last trimmed."""
    trim = _malloc_trim()
    if trim is None:
        return lambda: None
    low = [_resident()]

    def check() -> None:
        if _resident() > low[0] + growth:
            trim(0)
            low[0] = _resident()

    return check


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, or None where there is another allocator."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found if Path("/proc/self/statm").exists() else None


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Answer:
    """The result of one call, or the reason why there is none."""

    ticket: int
    result: Any = None
    error: str | None = None


class _Ahead:
    """An iterator of calls that can prepare the next one before it is due."""

    def __init__(self, calls: Iterator[tuple[int, Any]]) -> None:
        self._calls = calls
        self._next: list[tuple[int, Any]] = []

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        return self._next.pop() if self._next else next(self._calls)

    def prepare(self) -> None:
        if not self._next:
            self._next.extend(islice(self._calls, 1))


@dataclass
class _Worker:
    """A process and the call it has; `first_end` is how an earlier process ended that had the same call."""

    process: BaseProcess
    pipe: Connection
    ticket: int | None = None
    call: Any = None
    first_end: str | None = None


class WorkerPool:
    """Runs `start(setup)(call)` in `num_workers` processes, or in this one where that is 0.

    A process that dies is replaced, and its call is repeated once within the same deadline: calls must give the same
    result when a process that had them before ended halfway. The second death is the call's error. Calls that raise
    or outlast the deadline are not repeated.
    """

    def __init__(self, start: Start, setup: Any, num_workers: int) -> None:
        self._start, self._setup = start, setup
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._handler: Handler | None = None
        self._context: Any = multiprocessing.get_context(_start_method())
        if num_workers:
            warm_up()
        for _ in range(num_workers):
            self._workers.append(self._spawn())

    def map(self, calls: Iterable[Any], seconds: float) -> Iterator[Answer]:
        """An answer for every call, as they come; `Answer.ticket` counts the calls from 0."""
        if not self._num_workers:
            yield from self._map_here(calls)
            return
        pending = _Ahead(enumerate(calls))
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            self._feed(worker, pending)
        pending.prepare()
        while busy := [worker for worker in self._workers if worker.ticket is not None]:
            left = deadline - time.monotonic()
            with part("waiting for clients"):
                ready = wait([worker.pipe for worker in busy], timeout=min(LONGEST_WAIT, max(0.0, left)))
            for worker in busy:
                is_over = time.monotonic() >= deadline
                if worker.pipe in ready:
                    answer = self._receive(worker, may_repeat=not is_over)
                elif is_over:
                    answer = self._give_up(worker, too_late(seconds))
                else:
                    continue
                if answer is None:
                    continue
                worker.ticket = worker.call = worker.first_end = None
                if not is_over:
                    # First of all, so that no worker waits while its last answer is read and the next call is made.
                    self._feed(worker, pending)
                    pending.prepare()
                yield answer
        for ticket, _ in pending:
            yield Answer(ticket, error=too_late(seconds))

    def close(self) -> None:
        """End all workers; safe to call twice."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def _map_here(self, calls: Iterable[Any]) -> Iterator[Answer]:
        if self._handler is None:
            self._handler = self._start(self._setup)
        for ticket, call in enumerate(calls):
            yield _call(self._handler, ticket, call)

    @timed("sending")
    def _feed(self, worker: _Worker, pending: Iterator[tuple[int, Any]]) -> None:
        worker.ticket, worker.call = next(pending, (None, None))
        if worker.ticket is None:
            return
        try:
            worker.pipe.send((worker.ticket, worker.call))
        except OSError:
            # It died while it waited, which is nothing that the call did.
            self._replace(worker)
            self._send_again(worker)

    def _send_again(self, worker: _Worker) -> None:
        # One that is already dead is noticed when its answer is read.
        with suppress(OSError):
            worker.pipe.send((worker.ticket, worker.call))

    @timed("receiving")
    def _receive(self, worker: _Worker, *, may_repeat: bool) -> Answer | None:
        """The answer; None where the process died and another was given its call."""
        try:
            answer: Answer = worker.pipe.recv()
            return answer
        except (EOFError, OSError):
            worker.process.join(5)
            end = _how_it_ended(worker.process.exitcode)
        if worker.first_end is not None:
            return self._give_up(worker, f"both processes that had its job died: {worker.first_end}, then {end}")
        if not may_repeat:
            return self._give_up(worker, f"its process died: {end}")
        self._replace(worker)
        worker.first_end = end
        self._send_again(worker)
        return None

    def _give_up(self, worker: _Worker, reason: str) -> Answer:
        ticket = worker.ticket
        assert ticket is not None
        self._replace(worker)
        return Answer(ticket, error=reason)

    def _replace(self, worker: _Worker) -> None:
        """Replace a worker's process by a fresh one; the old one is gone when this returns and writes nothing more."""
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        fresh = self._spawn()
        worker.process, worker.pipe = fresh.process, fresh.pipe

    def _spawn(self) -> _Worker:
        for _ in range(STARTS - 1):
            # A process that is killed while it is being started.
            with suppress(OSError, EOFError):
                return self._started()
        try:
            return self._started()
        except (OSError, EOFError) as error:
            raise CannotContinue(
                f"a worker process cannot be started ({error}); free memory, or raise the limit on processes"
            ) from error

    def _started(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._start, self._setup), daemon=True, name="fedmtl-worker"
        )
        try:
            with _environment(ONE_THREAD):
                process.start()
        except (OSError, EOFError):
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(process, ours)


def too_late(seconds: float) -> str:
    """Why a client that did not answer in time does not count."""
    return f"no answer within {seconds:g} s (federation.round_timeout)"


def warm_up(imports: Sequence[str] = ("fedmtl.engines.local",)) -> None:
    """Let what all workers import be imported in the background; a pool that comes later finds it there.

    The first call counts.
    """
    if _start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(imports))
    with _environment(ONE_THREAD), _ignoring_interrupts():
        forkserver.ensure_running()


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _serve(pipe: Connection, start: Start, setup: Any) -> None:
    """A worker's life: build once, then answer calls until the pipe closes."""
    _end_with_parent()
    import torch

    # Ctrl-C goes to the whole group; the parent decides and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    handler: Handler | None = None
    trim = heap_trimmer()
    while True:
        try:
            ticket, call = pipe.recv()
        except (EOFError, OSError):
            return
        if handler is None:
            try:
                handler = start(setup)
            except FedmtlError as error:
                pipe.send(Answer(ticket, error=str(error)))
                continue
        pipe.send(_call(handler, ticket, call))
        trim()


def _end_with_parent() -> None:
    """A worker ends as soon as the process that uses it does, however that one ends and whatever the worker is doing.

    The run may be resumed at once, in the same folder: a job that went on would write over the files of the new ones.
    Its parent in the system's eyes is multiprocessing's fork server, which waits for its workers.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return "killed by SIGKILL (out of memory?)" if name == "SIGKILL" else f"killed by {name}"


@timed("waiting for clients")
def _call(handler: Handler, ticket: int, call: Any) -> Answer:
    try:
        return Answer(ticket, handler(call))
    except FedmtlError as error:
        return Answer(ticket, error=str(error))
    except Exception as error:
        return Answer(ticket, error=f"{type(error).__name__}: {error}")


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A process started here ignores Ctrl-C from its first moment, also while it imports; the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


ENDING = (signal.SIGINT, signal.SIGTERM)
# Until what swallowed an exception has returned.
AGAIN_SECONDS = 0.05


class Signals:
    """The signals of a block. They can wait while something is done that must be whole."""

    def __init__(self) -> None:
        self.given: BaseException | None = None
        self.is_postponed = False

    def check(self) -> None:
        """Raise what a signal has raised already, where code on the way may have made another error of it."""
        if self.given is not None:
            raise self.given

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """A first signal inside this block is raised at its end; a second one does what it did before `raised`."""
        self.is_postponed = True
        try:
            yield
        finally:
            self.is_postponed = False
        self.check()


@contextmanager
def raised(make: Callable[[int], BaseException]) -> Iterator[Signals]:
    """Inside the block, Ctrl-C and SIGTERM raise `make(number)`; a second signal does what it did before the block.

    Python drops an exception that is raised while an object is being deleted; then it is raised again soon after.
    Compiled code may make an error of another kind of it: an error that leaves the block after a signal becomes
    `make(number)`, and `check` raises it where such an error was handled on the way.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    timer: threading.Timer | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal timer
        for each in ENDING:
            signal.signal(each, before[each])
        signals.given = make(number)
        if not signals.is_postponed:
            timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
            raise signals.given

    def dropped(what: Any) -> None:
        if timer is None or what.exc_value is not signals.given:
            hook(what)
            return
        for each in ENDING:
            signal.signal(each, stop)
        timer.start()

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield signals
    except Exception as other:
        if signals.given is None:
            raise
        raise signals.given from other
    finally:
        if timer is not None:
            timer.cancel()
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)
