"""What we put into a Flower message: a kind, words, and a frame of bytes in Flower's own chunks.

A frame is never inflated: it goes to its file chunk by chunk, so that a large one costs a chunk of memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)
from google.protobuf.message import DecodeError

from fedmtl.errors import WireError
from fedmtl.federation.faults import read_fault

NOTE, FRAME = "note", "frame"
# Welcomes hold a config, hellos the token rows of a site.
MAX_WORDS = 1 << 24
MOST_LETTERS = 300

Pull = Callable[[str], bytes]


@dataclass(frozen=True)
class Envelope:
    """What came; `frame` is the file its bytes are in. An `error` says in our own words why there is none."""

    kind: str = ""
    words: str = ""
    frame: Path | None = None
    error: str | None = None


def fill_envelope(kind: str, words: str = "", frame: bytes | None = None) -> RecordDict:
    content = RecordDict({NOTE: ConfigRecord({"kind": kind, "words": words})})
    if frame is not None:
        content[FRAME] = ArrayRecord({FRAME: Array("uint8", (len(frame),), "fedmtl", frame)})
    return content


def open_envelope(message_id: str, pull: Pull, into: Path, max_bytes: int) -> Envelope:
    """Read a message object by object; whatever is not as `fill_envelope` makes it is a WireError."""
    try:
        return _open(message_id, pull, into, max_bytes)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, DecodeError) as error:
        into.unlink(missing_ok=True)
        raise WireError(f"the message cannot be read: {repr(error)[:MOST_LETTERS]}") from error


def _open(message_id: str, pull: Pull, into: Path, max_bytes: int) -> Envelope:
    message = pull(message_id)
    children = get_object_children_ids_from_object_content(message)
    if not children:
        return Envelope(error=read_fault(Message.inflate(message).error.reason))
    records = _references(pull(children[0]), RecordDict)
    note = ConfigRecord.inflate(pull(records[NOTE]))
    kind, words = note["kind"], note["words"]
    if not isinstance(kind, str) or not isinstance(words, str) or len(words) > MAX_WORDS:
        raise ValueError("its note is not one of ours")
    if FRAME not in records:
        return Envelope(kind, words)
    array = pull(_references(pull(records[FRAME]), ArrayRecord)[FRAME])
    chunks = get_object_children_ids_from_object_content(array)
    order = json.loads(get_object_body(array, Array))["arraychunk_ids"]
    written = 0
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("wb") as file:
        for index in order:
            body = get_object_body(pull(chunks[index]), ArrayChunk)
            written += len(body)
            if written > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes came")
            file.write(body)
    return Envelope(kind, words, into)


def _references(content: bytes, kind: type[RecordDict] | type[ArrayRecord]) -> dict[str, str]:
    names: dict[str, str] = json.loads(get_object_body(content, kind))
    return names
