"""What we put into a Flower message: a kind, words, and a frame of bytes in Flower's chunks.

A frame is never inflated: it goes to its file chunk by chunk, so that a large one costs a chunk of memory. Every chunk
begins with its number: no two of a frame are equal, so a frame has as many bytes as were sent for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedmtl.engines.flower.private import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK,
)
from fedmtl.engines.flower.private import (
    ArrayChunk,
    get_object_body,
    get_object_children_ids_from_object_content,
)
from fedmtl.engines.flower.records import FRAME, MAX_WORDS, MOST_LETTERS, NOTE, Envelope
from fedmtl.errors import FedmtlError, WireError
from fedmtl.federation.faults import UNREADABLE, read_fault
from fedmtl.foreign import printable

# The kinds of messages that have a frame.
FRAMED = ("job", "update", "model")
NUMBER = 8
PART = CHUNK - NUMBER

Pull = Callable[[str], bytes]


def fill_envelope(kind: str, words: str = "", frame: bytes | Path | None = None) -> RecordDict:
    """Return a message's content; a frame in a file is read once, into the memory that it is sent from."""
    content = RecordDict({NOTE: ConfigRecord({"kind": kind, "words": words})})
    if frame is not None:
        array = Array("uint8", (0,), "fedmtl", b"")
        # Flower only takes views of it.
        array.data = cast(bytes, _numbered(frame))
        record = ArrayRecord()
        record[FRAME] = array
        content[FRAME] = record
    return content


def open_envelope(message_id: str, pull: Pull, into: Path, max_bytes: int) -> Envelope:
    """Read a message object by object; whatever is not as `fill_envelope` makes it is a WireError."""
    try:
        return _open(message_id, pull, into, max_bytes)
    except OSError:
        into.unlink(missing_ok=True)
        raise
    except FedmtlError:
        raise
    except Exception as error:
        # Flower's decoders raise what they meet in a message that somebody made up.
        into.unlink(missing_ok=True)
        raise WireError(f"the message cannot be read: {printable(repr(error), MOST_LETTERS)}") from error


def _numbered(frame: bytes | Path) -> bytearray:
    size = frame.stat().st_size if isinstance(frame, Path) else len(frame)
    num_chunks = -(-size // PART)
    data = bytearray(size + NUMBER * num_chunks)
    view = memoryview(data)
    with frame.open("rb", buffering=0) if isinstance(frame, Path) else BytesIO(frame) as file:
        for number in range(num_chunks):
            chunk = view[number * CHUNK : (number + 1) * CHUNK]
            chunk[:NUMBER] = number.to_bytes(NUMBER, "big")
            rest = chunk[NUMBER:]
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise FedmtlError(f"{frame!s:.100}: became shorter while it was read; leave a run's files alone")
                rest = rest[count:]
    return data


def _open(message_id: str, pull: Pull, into: Path, max_bytes: int) -> Envelope:
    message = pull(message_id)
    children = get_object_children_ids_from_object_content(message)
    if not children:
        fault = read_fault(Message.inflate(message).error.reason)
        return Envelope(error=UNREADABLE) if fault is None else Envelope(error=fault.words(), client=fault.client)
    records = _references(pull(children[0]), RecordDict)
    note = ConfigRecord.inflate(pull(records[NOTE]))
    kind, words = note["kind"], note["words"]
    if not isinstance(kind, str) or not isinstance(words, str) or len(words) > MAX_WORDS:
        raise ValueError("its note is not one of ours")
    if FRAME not in records:
        return Envelope(kind, words)
    if kind not in FRAMED:
        raise ValueError("a frame in a message that has none")
    array = pull(_references(pull(records[FRAME]), ArrayRecord)[FRAME])
    chunks = get_object_children_ids_from_object_content(array)
    if json.loads(get_object_body(array, Array))["arraychunk_ids"] != list(range(len(chunks))):
        raise ValueError("its chunks are not in order, each once")
    _write(chunks, pull, into, max_bytes)
    return Envelope(kind, words, into)


def _write(chunks: list[str], pull: Pull, into: Path, max_bytes: int) -> None:
    written = 0
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("wb") as file:
        for number, chunk in enumerate(chunks):
            body = get_object_body(pull(chunk), ArrayChunk)
            if body[:NUMBER] != number.to_bytes(NUMBER, "big"):
                raise ValueError(f"chunk {number} has another number")
            written += len(body) - NUMBER
            if written > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes came")
            file.write(memoryview(body)[NUMBER:])


def _references(content: bytes, kind: type[RecordDict] | type[ArrayRecord]) -> dict[str, str]:
    names: dict[str, str] = json.loads(get_object_body(content, kind))
    return names
