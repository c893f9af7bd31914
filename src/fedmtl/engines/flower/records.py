"""What an app's messages have in them, over Flower's public API: words, and a frame of bytes as one array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedmtl.errors import WireError
from fedmtl.foreign import printable

NOTE, FRAME = "note", "frame"
# Welcomes hold a config, hellos the token rows of a site.
MAX_WORDS = 1 << 24
MOST_LETTERS = 300


@dataclass(frozen=True)
class Envelope:
    """What came; `frame` is the file its bytes are in.

    An `error` says why there is none, in words of this project; `client` is then the site's name as it gives it.
    """

    kind: str = ""
    words: str = ""
    frame: Path | None = None
    error: str | None = None
    client: str | None = None


def frame_record(frame: bytes) -> ArrayRecord:
    """Return the record of a frame; Flower sends it in chunks."""
    return ArrayRecord({FRAME: Array("uint8", (len(frame),), "fedmtl", frame)})


def frame_of(content: RecordDict) -> bytes:
    """Return the frame of a message's content; one without it raises a KeyError."""
    data: bytes = content.array_records[FRAME][FRAME].data
    return data


def fill_records(words: Mapping[str, str], frame: bytes | None = None) -> RecordDict:
    """Return a message's content: its words by name, and its frame where it has one."""
    content = RecordDict({NOTE: ConfigRecord(dict(words))})
    if frame is not None:
        content[FRAME] = frame_record(frame)
    return content


def read_words(content: RecordDict) -> dict[str, str]:
    """Return the words of a message's content; a WireError says what is wrong with one that somebody made up."""
    try:
        note = dict(content.config_records[NOTE])
    except Exception as error:
        raise WireError(f"the message cannot be read: {printable(repr(error), MOST_LETTERS)}") from error
    if not all(isinstance(value, str) and len(value) <= MAX_WORDS for value in note.values()):
        raise WireError("the message cannot be read: its note is not one of ours")
    return {name: str(value) for name, value in note.items()}


def open_records(content: RecordDict, into: Path, max_bytes: int) -> Envelope:
    """Read a message's content, its frame into a file; whatever is not as `fill_records` makes it is a WireError."""
    words = read_words(content)
    if FRAME not in content:
        return Envelope(words.get("kind", ""), words.get("words", ""))
    try:
        frame = frame_of(content)
    except Exception as error:
        raise WireError(f"the message cannot be read: {printable(repr(error), MOST_LETTERS)}") from error
    if len(frame) > max_bytes:
        raise WireError(f"the message cannot be read: more than {max_bytes} bytes came")
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_bytes(frame)
    return Envelope(words.get("kind", ""), words.get("words", ""), into)
