"""Watches processes that try inputs: hangs and crashes are noticed, the process is replaced, everything is counted."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from fuzz.loop import Board, Finding, Note, Piece, work
from fuzz.targets import Target

GLANCE = 0.05
# The watcher is kind to a busy machine: what was too slow is tried once more, alone, before it counts.
MOST_LOST = 12
# Opening a target loads a model or makes keys.
OPENING = 120.0


@dataclass
class Figures:
    """What came of a target."""

    target: Target
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    growth: int = 0
    findings: list[Finding] = field(default_factory=list)
    lost: int = 0

    def count(self, kind: str) -> int:
        return sum(finding.count for finding in self.findings if finding.kind == kind)

    def add(self, finding: Finding) -> None:
        """Count it with others of its class; the shortest input stays."""
        for known in self.findings:
            if (known.kind, known.where) == (finding.kind, finding.where):
                known.count += finding.count
                if len(finding.data) < len(known.data):
                    known.data, known.message, known.detail = finding.data, finding.message, finding.detail
                return
        self.findings.append(finding)


class _Process:
    """One forked process at its piece."""

    def __init__(self, piece: Piece, folder: Path) -> None:
        self.piece, self.folder = piece, folder
        self.board = Board()
        self.findings: list[Finding] = []
        self.done: int | None = None
        self.started = time.monotonic()
        # Of the processor, without what opening it took; others use the machine too.
        self.seconds: float | None = None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_begin, args=(piece, folder, self.board, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> None:
        """Take what the process said; a class of findings may be said more than once, the last word holds."""
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                word, *rest = self._pipe.recv()
                if word == "opened":
                    self.started = time.monotonic()
                elif word == "done":
                    self.done, self.seconds, self.findings = rest
                else:
                    (finding,) = rest
                    self.findings = [f for f in self.findings if (f.kind, f.where) != (finding.kind, finding.where)]
                    self.findings.append(finding)

    def overdue(self) -> tuple[Note, bytes] | None:
        note, data = self.board.read()
        # Shortening a failing input is many runs; each is noted with its start.
        if note.started and time.monotonic() - note.started > self.piece.target.seconds:
            return note, data
        return None

    def stack(self) -> str:
        """The stack that the process writes on a signal."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
            return (self.folder / ".stack").read_text()
        return ""

    def said(self) -> str:
        """The last words of a process that died."""
        with contextlib.suppress(OSError):
            return (self.folder / ".said").read_text(errors="replace")[-4000:]
        return ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _begin(piece: Piece, folder: Path, board: Board, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What it says last is of interest if it dies.
    said = os.open(folder / ".said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    work(piece, folder, board, pipe)


def run_pieces(
    pieces: Sequence[Piece], workers: int, folder: Path, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Figures]:
    """All pieces, so many at a time; figures by target."""
    figures = {piece.target.name: Figures(piece.target) for piece in pieces}
    waiting = list(pieces)
    running: list[_Process] = []
    numbers = iter(range(1 << 30))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                piece = waiting.pop(0)
                if figures[piece.target.name].lost < MOST_LOST:
                    running.append(_Process(piece, folder / f"{piece.target.name}-{next(numbers)}"))
            time.sleep(GLANCE)
            for process in list(running):
                rest = _look_at(process, figures[process.piece.target.name], folder, tell)
                if rest is not None:
                    running.remove(process)
                    waiting[:0] = rest
    finally:
        for process in running:
            process.end()
    return figures


def _look_at(process: _Process, figures: Figures, folder: Path, tell: Callable[[str], None]) -> list[Piece] | None:
    """What is left to do of a process that has ended or had to; None while it goes on."""
    process.hear()
    overdue = process.overdue()
    is_alive = process.process.is_alive()
    if overdue is None and is_alive and process.done is None:
        return None
    process.hear()
    note, data = process.board.read()
    left: list[Piece] = []
    if process.done is None:
        index = max(note.index, process.piece.start)
        if overdue is not None:
            note, data = overdue
            stack = process.stack()
            process.end()
            if _is_slow_again(process.piece, data, folder):
                process.findings.append(_hang(process.piece.target, data, stack))
        else:
            code = process.process.exitcode
            reason = f"the process ended with code {code}"
            where = "in an input" if note.length else "while it was opened"
            name = process.piece.target.name
            process.findings.append(Finding(name, "crash", where, reason, data, process.said()))
        figures.lost += 1
        # What a hang took is not time that was spent on inputs.
        spent = max(0.0, (note.started or time.monotonic()) - process.started)
        left = [replace(process.piece, start=index + 1, seconds=process.piece.seconds - spent)]
    reached = process.done if process.done is not None else max(note.index, process.piece.start) + bool(note.length)
    process.end()
    _count(process, figures, note, reached)
    tell(f"{process.piece.target.name}: {figures.inputs:,} inputs, {len(figures.findings)} classes of findings")
    return [piece for piece in left if piece.start < piece.stop and piece.seconds > 0]


def _count(process: _Process, figures: Figures, note: Note, reached: int) -> None:
    figures.inputs += max(0, reached - process.piece.start)
    figures.accepted += note.accepted
    figures.refused += note.refused
    figures.seconds += process.seconds if process.seconds is not None else time.monotonic() - process.started
    figures.slowest = max(figures.slowest, note.slowest)
    figures.growth = max(figures.growth, note.growth)
    for finding in process.findings:
        figures.add(finding)


def _is_slow_again(piece: Piece, data: bytes, folder: Path) -> bool:
    """Whether the input alone takes too long once more, with twice the time."""
    target = replace(piece.target, seconds=2 * piece.target.seconds)
    again = _Process(replace(piece, target=_with_corpus(target, data), start=0, stop=1, seconds=1e9), folder / "again")
    try:
        while again.done is None and again.process.is_alive():
            time.sleep(GLANCE)
            again.hear()
            if again.overdue() is not None or time.monotonic() - again.started > OPENING + 2 * target.seconds:
                return True
        again.hear()
        return again.done is None
    finally:
        again.end()


def _with_corpus(target: Target, data: bytes) -> Target:
    """The target with this input as its corpus."""

    class Single(Target):
        def seeds(self) -> list[bytes]:
            return []

        def corpus(self) -> list[bytes]:
            return [data]

    return Single(**{name: getattr(target, name) for name in target.__dataclass_fields__})


def _hang(target: Target, data: bytes, stack: str) -> Finding:
    lines = [line.strip() for line in stack.splitlines() if "/fedmtl/" in line]
    where = lines[0].rpartition("/src/")[2] if lines else "unknown"
    return Finding(target.name, "hang", where, f"took more than {target.seconds:g} s, twice", data, stack)
