"""What a site's worker does for whoever has the line to the server, and the record of what comes and leaves.

Nothing here depends on how messages travel: over this project's port, or by a stock SuperNode.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.audit import Audit, describe_frame
from fedmtl.engines.flower.records import Envelope
from fedmtl.federation.faults import Fault

KNOWN = ("welcome", "refused", "end", "job", "model")


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


class Recorder:
    """Writes every message in and out into a site's record before it is acted on or sent; without one, nothing."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._number = 0

    def arrived(self, envelope: Envelope) -> None:
        """Record a message of the server."""
        kind = envelope.kind if envelope.kind in KNOWN else "unknown"
        content = envelope.words.encode() if envelope.frame is None else envelope.frame
        self._number = self._record("in", kind, content, **self._described(envelope.frame))

    def unreadable(self) -> None:
        """Record a message that could not be read."""
        self._record("in", "unreadable", b"")

    def leaves(self, answer: str | Path | Refused) -> None:
        """Record what is to leave for the last message: a hello, an update's file, or the fault of a refusal."""
        if isinstance(answer, Refused):
            fault = answer.fault.model_dump_json(exclude_none=True)
            self._record("out", "failure", fault.encode(), decision=f"refused: {answer.fault.code}",
                         answers=self._number)  # fmt: skip
        elif isinstance(answer, Path):
            self._record("out", "update", answer, decision="accepted", **self._described(answer), answers=self._number)
        else:
            self._record("out", "hello", answer.encode(), decision="accepted", answers=self._number)

    def _described(self, frame: Path | None) -> dict[str, Any]:
        if frame is None or self._audit is None:
            return {}
        return {key: value for key, value in describe_frame(frame).items() if value is not None}

    def _record(self, way: str, kind: str, content: bytes | Path, **facts: Any) -> int:
        return 0 if self._audit is None else self._audit.record(way, kind, content, **facts)
