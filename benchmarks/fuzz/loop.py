"""One process that gives a target mutated inputs, and what it found.

The process is forked from one that has loaded everything. It notes in shared memory which input it is at and since
when, so that whoever watches it (`watch.py`) knows what a hang or a crash was about.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import TracebackType

from fuzz.mutate import MOST_BYTES
from fuzz.targets import MEBIBYTE, Run, Target

# What a process may take on top of what it has when it starts; a bomb then is a MemoryError and no dead machine.
ADDRESS_SPACE = 3 << 30
# Inputs that were refused by a new line are changed further, as long as they are small.
MOST_POOL, LARGEST_POOLED = 400, 1 << 15
# JSON's shortest list is two letters and some sixty bytes, and a list in a list in a list one letter each.
BYTES_A_BYTE = 100
SHORTENING_SECONDS, SHORTENING_RUNS = 4.0, 500
NOTE = struct.Struct("<QdQQQdQ")


@dataclass(frozen=True)
class Piece:
    """Inputs `start` to `stop` of a target, for at most `seconds`."""

    target: Target
    start: int
    stop: int
    seconds: float
    seed: int


@dataclass
class Finding:
    """What an input did that none may do; `where` names its class, `count` how many inputs were of it."""

    target: str
    kind: str
    where: str
    message: str
    data: bytes
    detail: str = ""
    count: int = 1


@dataclass(frozen=True)
class Note:
    """How far a process is; `started` is 0 between inputs."""

    index: int = 0
    started: float = 0.0
    length: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    growth: int = 0


class Board:
    """Memory that the process writes and its watcher reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NOTE.size + 4 * MOST_BYTES)

    def write(self, note: Note, data: bytes) -> None:
        self._memory[NOTE.size : NOTE.size + len(data)] = data
        self.update(note)

    def update(self, note: Note) -> None:
        NOTE.pack_into(
            self._memory,
            0,
            note.index,
            note.started,
            note.length,
            note.accepted,
            note.refused,
            note.slowest,
            note.growth,
        )

    def read(self) -> tuple[Note, bytes]:
        note = Note(*NOTE.unpack_from(self._memory))
        return note, self._memory[NOTE.size : NOTE.size + note.length]


@dataclass
class _Progress:
    """What the process has seen so far."""

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    growth: int = 0
    peak: int = 0
    origins: set[tuple[object, ...]] = field(default_factory=set)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)


def work(piece: Piece, folder: Path, board: Board, pipe: Connection) -> None:
    """Give the target its inputs; findings go into the pipe, the last word is how many inputs there were."""
    quiet()
    faulthandler.register(signal.SIGUSR1, file=(folder / ".stack").open("w"), all_threads=False)
    workspace = folder / "own"
    workspace.mkdir(exist_ok=True)
    _Worker(piece, piece.target.open(workspace), board, pipe).go()


def quiet() -> None:
    """Nothing that a library logs or warns of is of interest here."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


class _Worker:
    def __init__(self, piece: Piece, run: Run, board: Board, pipe: Connection) -> None:
        self._piece, self._run, self._board, self._pipe = piece, run, board, pipe
        self._target = piece.target
        self._seeds, self._corpus = self._target.seeds(), self._target.corpus()
        self._pool = list(self._corpus) or [b""]
        self._seen = _Progress()
        self._index = piece.start

    def go(self) -> None:
        random = Random()
        # Whatever is loaded with the first inputs is not memory that an input took.
        self._warm_up()
        self._pipe.send(("opened",))
        began = time.process_time()
        base = zlib.crc32(f"{self._piece.seed}/{self._target.name}".encode()) << 32
        end = time.monotonic() + self._piece.seconds
        index = self._piece.start
        while index < self._piece.stop and time.monotonic() < end:
            random.seed(base + index)
            if index < len(self._corpus):
                data = self._corpus[index]
            else:
                # Half of them from what is whole, half from what came somewhere new.
                start = random.choice(self._seeds if self._seeds and random.random() < 0.5 else self._pool)
                data = self._target.format.mutate(start, random, self._pool)[: 2 * MOST_BYTES]
            self.try_input(index, data, random)
            index += 1
        self._pipe.send(("done", index, time.process_time() - began, list(self._seen.findings.values())))

    def _warm_up(self) -> None:
        for data in self._seeds:
            self._note(self._piece.start, data)
            outcome(self._run, data)
        limit_memory()
        self._seen.peak = _peak()

    def try_input(self, index: int, data: bytes, random: Random) -> None:
        seen = self._seen
        self._index = index
        started = self._note(index, data)
        error = outcome(self._run, data)
        taken, peak = time.monotonic() - started, _peak()
        seen.slowest = max(seen.slowest, taken)
        grown = peak - seen.peak
        if grown > 0:
            seen.growth, seen.peak = seen.growth + grown, peak
        self._judge(error, grown, data, random)
        self._board.update(Note(index + 1, 0.0, 0, seen.accepted, seen.refused, seen.slowest, seen.growth))

    def _note(self, index: int, data: bytes) -> float:
        """Say on the board what is tried now, and when it began."""
        seen, started = self._seen, time.monotonic()
        note = Note(index, started, len(data), seen.accepted, seen.refused, seen.slowest, seen.growth)
        self._board.write(note, data)
        return started

    def _judge(self, error: BaseException | None, grown: int, data: bytes, random: Random) -> None:
        seen = self._seen
        if error is None:
            seen.accepted += 1
            self._remember(("accepted", random.randrange(100)), data, random)
        elif isinstance(error, self._target.expected) and not isinstance(error, MemoryError):
            seen.refused += 1
            self._remember(_origin(error), data, random)
        else:
            self._report("memory" if isinstance(error, MemoryError) else "exception", error, data)
            return
        if grown > self._target.memory + BYTES_A_BYTE * len(data):
            self._report("memory", MemoryError(f"the process grew by {grown // MEBIBYTE} MiB"), data)

    def _remember(self, origin: tuple[object, ...], data: bytes, random: Random) -> None:
        """Add an input that came to a new line to the pool: it is a better start than the corpus."""
        if origin in self._seen.origins or len(data) > LARGEST_POOLED:
            return
        self._seen.origins.add(origin)
        if len(self._pool) < MOST_POOL:
            self._pool.append(data)
        else:
            self._pool[random.randrange(len(self._corpus), MOST_POOL)] = data

    def _report(self, kind: str, error: BaseException, data: bytes) -> None:
        where = error_class(error)
        known = self._seen.findings.get((kind, where))
        if known is not None:
            known.count += 1
            return
        message = f"{type(error).__name__}: {str(error)[:300]!r}"
        finding = Finding(
            self._target.name, kind, where, message, data, "".join(traceback.format_exception(error))[-6000:]
        )
        self._seen.findings[kind, where] = finding
        self._pipe.send(("found", finding))
        if kind == "exception":
            finding.data = self._shortened(data, where)
            self._pipe.send(("shortened", finding))

    def _shortened(self, data: bytes, where: str) -> bytes:
        def fails(candidate: bytes) -> bool:
            if len(candidate) > MOST_BYTES:
                return False
            self._note(self._index, candidate)
            error = outcome(self._run, candidate)
            return error is not None and not isinstance(error, self._target.expected) and error_class(error) == where

        return shorten(data, fails, self._target)


def outcome(run: Run, data: bytes) -> BaseException | None:
    """The error that an input raises; none where it is accepted."""
    try:
        run(data)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return error
    return None


def shorten(data: bytes, fails: Callable[[bytes], bool], target: Target) -> bytes:
    """A shorter input that fails on the same line, part by part; the given one where there is none in time."""
    end, runs = time.monotonic() + SHORTENING_SECONDS, 0
    try:
        parts, join = target.format.take_apart(data)
        if not fails(join(parts)):
            raise ValueError("it is the outside that fails")
    except Exception:
        parts, join = [data], lambda parts: parts[0]
    parts = list(parts)
    for number in range(len(parts)):
        size = max(1, len(parts[number]) // 2)
        while size and runs < SHORTENING_RUNS and time.monotonic() < end:
            offset = 0
            while offset < len(parts[number]) and runs < SHORTENING_RUNS and time.monotonic() < end:
                part = parts[number]
                candidate = [*parts[:number], part[:offset] + part[offset + size :], *parts[number + 1 :]]
                runs += 1
                if fails(join(candidate)):
                    parts = candidate
                else:
                    offset += size
            size //= 2
    return join(parts)


def error_class(error: BaseException) -> str:
    """The class of an unexpected error: its type, our innermost line on its way, and the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/fedmtl/" in frame.filename]
    names = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in (*ours[-1:], *frames[-1:])]
    if isinstance(error, RecursionError):
        names = names[:1] and [f"{_short(ours[0].filename)} {ours[0].name}" if ours else ""]
    return " < ".join([type(error).__name__, *dict.fromkeys(names)])


def _short(filename: str) -> str:
    for root in ("/src/", "/site-packages/", "/benchmarks/", "/lib/"):
        if root in filename:
            return filename.rpartition(root)[2]
    return filename


def _origin(error: BaseException) -> tuple[object, ...]:
    cause = error.__cause__ or error.__context__
    return (*_last(error.__traceback__), *_last(cause.__traceback__ if cause is not None else None))


def _last(trace: TracebackType | None) -> tuple[object, ...]:
    if trace is None:
        return ()
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_memory() -> None:
    """From here on this process gets so much more address space, and then MemoryErrors."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
