"""Worker processes of one thread each, which keep their model between calls; or the same work in this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fedmtl.engines.memory import heap_trimmer
from fedmtl.errors import FedmtlError

# Set for the workers before any numeric library loads: one thread per process, and no idle pools of them.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# The operating system takes no wait of years.
LONGEST_WAIT = 3600.0

Handler = Callable[[Any], Any]
Start = Callable[[Any], Handler]


@dataclass(frozen=True)
class Answer:
    """The result of one call, or the reason why there is none."""

    ticket: int
    result: Any = None
    error: str | None = None


class _Ahead:
    """The calls, of which the next may be made before it is asked for."""

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
    process: BaseProcess
    pipe: Connection
    ticket: int | None = None


class WorkerPool:
    """Runs `start(setup)(call)` in `num_workers` processes, or in this one where that is 0.

    A worker that dies or outlasts its time costs the one call it had, and is replaced.
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
            ready = wait([worker.pipe for worker in busy], timeout=min(LONGEST_WAIT, max(0.0, left)))
            for worker in busy:
                is_over = time.monotonic() >= deadline
                if worker.pipe in ready:
                    answer = self._receive(worker)
                elif is_over:
                    answer = self._replace(worker, too_late(seconds))
                else:
                    continue
                worker.ticket = None
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

    def _feed(self, worker: _Worker, pending: Iterator[tuple[int, Any]]) -> None:
        worker.ticket, call = next(pending, (None, None))
        if worker.ticket is not None:
            # A worker that died while it waited is noticed when its answer is read.
            with suppress(OSError):
                worker.pipe.send((worker.ticket, call))

    def _receive(self, worker: _Worker) -> Answer:
        try:
            answer: Answer = worker.pipe.recv()
            return answer
        except (EOFError, OSError):
            worker.process.join(5)
            return self._replace(worker, f"its process ended with code {worker.process.exitcode}")

    def _replace(self, worker: _Worker, reason: str) -> Answer:
        ticket = worker.ticket
        assert ticket is not None
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        fresh = self._spawn()
        worker.process, worker.pipe = fresh.process, fresh.pipe
        return Answer(ticket, error=reason)

    def _spawn(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._start, self._setup), daemon=True, name="fedmtl-worker"
        )
        with _environment(ONE_THREAD):
            process.start()
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
