"""A site's life on the line: take what comes, hand it to the worker that has the text, and bring its answer back.

This process imports neither torch nor transformers, and holds no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.line import FIRST_WAIT, LONGEST_WAIT, Line, LineLost, Received
from fedmtl.engines.worker import Answer, WorkerPool
from fedmtl.errors import CannotContinue, FedmtlError, WireError

FOREVER = 1e9

Say = Callable[[str], None]


class SiteRefused(CannotContinue):
    """The server will not have this site; its reason says why."""


class CannotJoin(FedmtlError):
    """The site cannot do what the run needs: a file, a label or the encoder is missing here."""


@dataclass(frozen=True)
class WelcomeCall:
    """The server's welcome, for the worker to answer with a hello."""

    words: str


@dataclass(frozen=True)
class SiteJob:
    """A job's file; the welcome comes along, for a worker that was started in between."""

    words: str
    frame: Path


def serve_site(line: Line, pool: WorkerPool, say: Say) -> str:
    """Take part until the run is over; what the server says at its end. The line is closed then."""
    words = ""
    keeper = _Keeper(line, say)
    with closing(line), line.alive():
        while True:
            received = keeper.next_message()
            envelope = received.envelope
            if envelope.kind == "end":
                with suppress(LineLost):
                    line.leave()
                return envelope.words
            if envelope.kind == "refused":
                raise SiteRefused(f"the server refused this site: {envelope.words}")
            if envelope.kind == "welcome":
                words = envelope.words
                answer = _call(pool, WelcomeCall(words))
                keeper.answer(received, answer)
                if answer.error is not None:
                    raise CannotJoin(answer.error)
            elif envelope.frame is not None:
                keeper.answer(received, _call(pool, SiteJob(words, envelope.frame)))


class _Keeper:
    """Takes a lost line up again: the server then welcomes the site anew, and asks again what it still wants."""

    def __init__(self, line: Line, say: Say) -> None:
        self._line, self._say = line, say
        self._is_joined = False
        self._is_told = False

    def next_message(self) -> Received:
        wait = FIRST_WAIT
        while True:
            try:
                if not self._is_joined:
                    self._line.join()
                    self._say("connected to the server")
                    self._is_joined, self._is_told, wait = True, False, FIRST_WAIT
                received = self._line.receive()
                if received is not None:
                    return received
            except WireError as error:
                self._say(f"a message could not be read: {error}")
            except LineLost as error:
                self._lost(f"the server is not there ({error}); trying again until it is")
                time.sleep(wait)
                wait = min(LONGEST_WAIT, 2 * wait)

    def answer(self, received: Received, answer: Answer) -> None:
        frame = received.envelope.frame
        try:
            if answer.error is not None:
                self._line.fail(received.message, answer.error)
            elif isinstance(answer.result, Path):
                self._line.answer(received.message, "update", frame=answer.result)
            else:
                self._line.answer(received.message, "hello", words=answer.result)
        except LineLost as error:
            self._lost(f"the answer could not be sent ({error}); trying again until the server is there")
        finally:
            for path in (frame, answer.result):
                if isinstance(path, Path):
                    path.unlink(missing_ok=True)

    def _lost(self, words: str) -> None:
        if not self._is_told:
            self._say(words)
        self._is_joined, self._is_told = False, True


def _call(pool: WorkerPool, call: Any) -> Answer:
    (answer,) = pool.map([call], FOREVER)
    return answer
