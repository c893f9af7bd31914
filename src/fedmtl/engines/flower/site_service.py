"""A site's life on the line: take what comes, hand it to the worker that has the text, and bring its answer back.

This process imports neither torch nor transformers, and opens no file of examples. Every message in and out is in the
site's record (`audit.py`) before it is acted on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.audit import Audit
from fedmtl.engines.flower.calls import Done, ModelCall, Recorder, Refused, SiteJob, WelcomeCall
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
        self._line, self._say, self._record = line, say, Recorder(audit)
        self._is_joined = False
        self._is_reported = False

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
                    self._record.arrived(received.envelope)
                    return received
            except WireError as error:
                self._record.unreadable()
                self._say(f"a message could not be read: {printable(str(error), MOST_LETTERS)}")
            except LineLost as error:
                self._lost(f"the server is not there ({printable(str(error), MOST_LETTERS)}); trying again until it is")
                time.sleep(wait)
                wait = min(LONGEST_WAIT, 2 * wait)

    def answer(self, received: Received, answer: str | Path | Refused) -> None:
        """Record what is to leave, then send it: a hello, an update's file, or the fault of a refusal."""
        frame = received.envelope.frame
        try:
            self._record.leaves(answer)
            if isinstance(answer, Refused):
                self._line.fail(received.message, answer.fault.model_dump_json(exclude_none=True))
            elif isinstance(answer, Path):
                self._line.answer(received.message, "update", frame=answer)
            else:
                self._line.answer(received.message, "hello", words=answer)
        except LineLost as error:
            why = printable(str(error), MOST_LETTERS)
            self._lost(f"the answer could not be sent ({why}); trying again until the server is there")
        finally:
            for path in (frame, answer):
                if isinstance(path, Path):
                    path.unlink(missing_ok=True)

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
