"""A site's life on the line: take what comes, hand it to the worker that has the text, and bring its answer back.

This process imports neither torch nor transformers, and opens no file of examples. Every message in and out is in the
site's record (`audit.py`) before it is acted on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.audit import Audit, describe_frame
from fedmtl.engines.flower.line import FIRST_WAIT, LONGEST_WAIT, Line, LineLost, Received
from fedmtl.engines.processes import Answer, WorkerPool
from fedmtl.errors import CannotContinue, FedmtlError, WireError
from fedmtl.federation.faults import Fault
from fedmtl.foreign import printable

FOREVER = 1e9
# Of foreign words on this site's terminal.
MOST_LETTERS = 500

Say = Callable[[str], None]


class SiteRefused(CannotContinue):
    """The server will not have this site; its reason says why."""


class CannotJoin(FedmtlError):
    """The site cannot do what the run needs: a file, a label or the encoder is missing here."""


class ModelNotSaved(FedmtlError):
    """The run is over, and the model that the site's owner wanted was not sent or is not the server's."""


@dataclass(frozen=True)
class WelcomeCall:
    """The server's welcome, for the worker to answer with a hello."""

    words: str


@dataclass(frozen=True)
class SiteJob:
    """A job's file; the welcome comes along, for a worker that was started in between."""

    words: str
    frame: Path


@dataclass(frozen=True)
class ModelCall:
    """The finished model in a file, with the server's words about it, for the worker to check and save."""

    words: str
    frame: Path
    about: str


@dataclass(frozen=True)
class Refused:
    """A worker's answer where there is none: `words` are for this site's terminal, `fault` is all that may leave."""

    fault: Fault
    words: str


@dataclass(frozen=True)
class Done:
    """A worker's answer to a job: the update's file, and a line for this site's terminal, which stays here."""

    update: Path
    words: str


def serve_site(
    line: Line,
    pool: WorkerPool,
    say: Say,
    audit: Audit | None = None,
    client: str | None = None,
    *,
    wants_model: bool = False,
) -> str:
    """Take part until the run is over; what the server says at its end. The line is closed then.

    A site that cannot take part tells the server so under the name `client`, and leaves. One that wants the finished
    model and does not get it raises a ModelNotSaved when the run is over.
    """
    words = ""
    lacks: str | None = "no model came"
    keeper = _Keeper(line, say, audit)
    with closing(line), line.alive():
        while True:
            received = keeper.next_message()
            envelope = received.envelope
            if envelope.kind == "end":
                with suppress(LineLost):
                    line.leave()
                said = printable(envelope.words, MOST_LETTERS)
                if wants_model and lacks is not None:
                    raise ModelNotSaved(
                        f"--save-model: the run is over, and nothing was saved: {lacks}; the server says: {said}"
                    )
                return said
            if envelope.kind == "refused":
                raise SiteRefused(f"the server refused this site: {printable(envelope.words, MOST_LETTERS)}")
            if envelope.kind == "welcome":
                words = envelope.words
                answer = _settled(_call(pool, WelcomeCall(words)))
                if isinstance(answer, Refused):
                    answer = replace(answer, fault=answer.fault.model_copy(update={"client": client}))
                keeper.answer(received, answer)
                if isinstance(answer, Refused):
                    with suppress(LineLost):
                        line.leave()
                    raise CannotJoin(answer.words)
            elif envelope.kind == "model" and envelope.frame is not None:
                if wants_model:
                    lacks = _saved(pool, ModelCall(words, envelope.frame, envelope.words), say)
                envelope.frame.unlink(missing_ok=True)
            elif envelope.kind == "job" and envelope.frame is not None:
                answer = _settled(_call(pool, SiteJob(words, envelope.frame)))
                if isinstance(answer, Done):
                    say(answer.words)
                    answer = answer.update
                keeper.answer(received, answer)
                if isinstance(answer, Refused):
                    say(f"a job was not done: {printable(answer.words, MOST_LETTERS)}")


def _saved(pool: WorkerPool, call: ModelCall, say: Say) -> str | None:
    """Have the model saved; the reason where it was not."""
    answer = _settled(_call(pool, call))
    if isinstance(answer, Refused):
        return printable(answer.words, MOST_LETTERS)
    say(str(answer))
    return None


class _Keeper:
    """Reconnects a lost line: the server then welcomes the site anew, and sends its open jobs again."""

    def __init__(self, line: Line, say: Say, audit: Audit | None) -> None:
        self._line, self._say, self._audit = line, say, audit
        self._is_joined = False
        self._is_reported = False
        self._number = 0

    def next_message(self) -> Received:
        wait = FIRST_WAIT
        while True:
            try:
                if not self._is_joined:
                    self._line.join()
                    self._say("connected to the server")
                    self._is_joined, self._is_reported, wait = True, False, FIRST_WAIT
                received = self._line.receive()
                if received is not None:
                    self._note_arrival(received)
                    return received
            except WireError as error:
                self._record("in", "unreadable", b"")
                self._say(f"a message could not be read: {printable(str(error), MOST_LETTERS)}")
            except LineLost as error:
                self._lost(f"the server is not there ({printable(str(error), MOST_LETTERS)}); trying again until it is")
                time.sleep(wait)
                wait = min(LONGEST_WAIT, 2 * wait)

    def answer(self, received: Received, answer: str | Path | Refused) -> None:
        """Record what is to leave, then send it: a hello, an update's file, or the fault of a refusal."""
        frame = received.envelope.frame
        try:
            if isinstance(answer, Refused):
                fault = answer.fault.model_dump_json(exclude_none=True)
                self._record("out", "failure", fault.encode(), decision=f"refused: {answer.fault.code}")
                self._line.fail(received.message, fault)
            elif isinstance(answer, Path):
                self._record("out", "update", answer, decision="accepted", **self._described(answer))
                self._line.answer(received.message, "update", frame=answer)
            else:
                self._record("out", "hello", answer.encode(), decision="accepted")
                self._line.answer(received.message, "hello", words=answer)
        except LineLost as error:
            why = printable(str(error), MOST_LETTERS)
            self._lost(f"the answer could not be sent ({why}); trying again until the server is there")
        finally:
            for path in (frame, answer):
                if isinstance(path, Path):
                    path.unlink(missing_ok=True)

    def _note_arrival(self, received: Received) -> None:
        envelope = received.envelope
        known = ("welcome", "refused", "end", "job", "model")
        kind = envelope.kind if envelope.kind in known else "unknown"
        content = envelope.words.encode() if envelope.frame is None else envelope.frame
        self._number = self._record("in", kind, content, **self._described(envelope.frame))

    def _described(self, frame: Path | None) -> dict[str, Any]:
        if frame is None or self._audit is None:
            return {}
        return {key: value for key, value in describe_frame(frame).items() if value is not None}

    def _record(self, way: str, kind: str, content: bytes | Path, **facts: Any) -> int:
        if self._audit is None:
            return 0
        if way == "out":
            facts["answers"] = self._number
        return self._audit.record(way, kind, content, **facts)

    def _lost(self, words: str) -> None:
        if not self._is_reported:
            self._say(words)
        self._is_joined, self._is_reported = False, True


def _settled(answer: Answer) -> Any:
    """A worker's answer; one that ended without any has the fault that says so."""
    if answer.error is not None:
        return Refused(Fault(code="worker_ended"), answer.error)
    return answer.result


def _call(pool: WorkerPool, call: Any) -> Answer:
    (answer,) = pool.map([call], FOREVER)
    return answer
