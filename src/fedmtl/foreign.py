"""Text from other hands: JSON of any content as a value or one line, and any string as something that may be shown.

Files and messages are made by others, by other versions, by a failing disk. A reader that goes through here meets a
FedmtlError or a value of bounded depth, never an exception of the parser.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedmtl.errors import FedmtlError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Record = TypeVar("Record", bound=BaseModel)

# No record of ours is nested deeper than ten; what is, exhausts the stack of whoever walks it.
DEEPEST = 64
# An empty list is two letters and sixty bytes. A file of tensors has three lists and objects for each.
MOST_LISTS = 200_000
# Records of ours (a checkpoint's JSON, tasks.json, place.json) are kilobytes; with many clients some megabytes.
LARGEST_RECORD = 64 << 20

# C0, DEL and C1 move the cursor or start escape codes; line and paragraph separators begin a new line; the
# bidirectional marks and overrides reorder what stands around them; the others are invisible.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LETTERS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_EXCERPT = 160


def printable(text: str, most: int | None = None) -> str:
    """The text with everything that would steer a terminal, or hide in it, replaced by a visible escape.

    Of a longer text the first `most` letters are shown.
    """
    is_cut = most is not None and len(text) > most
    return _UNSAFE.sub(_visible, text[:most]) + ("..." if is_cut else "")


def _visible(match: re.Match[str]) -> str:
    sign = match[0]
    if sign in _LETTERS:
        return _LETTERS[sign]
    number = ord(sign)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def excerpt(text: object) -> str:
    """The first line of what a library said, short enough to stand in a message of one line."""
    first = next(iter(str(text).strip().splitlines()), "")
    return first if len(first) <= _EXCERPT else first[: _EXCERPT - 3] + "..."


def parse_json(text: str | bytes, where: str, remedy: str, error: type[FedmtlError] = FedmtlError) -> Any:
    """The value of a JSON text; one that is not JSON, too deep or has an endless number is an error with the remedy.

    So is one whose lists and objects would take a hundred times the memory of the text.
    """
    opening = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if opening > MOST_LISTS:
        raise error(f"{where}: bad JSON (more than {MOST_LISTS:,} lists and objects); {remedy}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as cause:
        raise error(f"{where}: bad JSON ({cause.msg} at character {cause.colno}); {remedy}") from None
    except UnicodeDecodeError:
        raise error(f"{where}: bad JSON (it is not UTF-8); {remedy}") from None
    except RecursionError:
        raise error(f"{where}: bad JSON (nested deeper than {DEEPEST}); {remedy}") from None
    except ValueError:
        # Python's limit on digits: converting a longer number takes quadratic time.
        raise error(f"{where}: bad JSON (a number of thousands of digits); {remedy}") from None
    if opening > DEEPEST and _is_deep(value):
        raise error(f"{where}: bad JSON (nested deeper than {DEEPEST}); {remedy}")
    return value


def read_json(path: Path, remedy: str, error: type[FedmtlError] = FedmtlError) -> Any:
    """The value in a file of one JSON record; a file that cannot be read is an error of the same kind."""
    return parse_json(read_record(path, remedy, error), str(path), remedy, error)


def read_record(path: Path, remedy: str, error: type[FedmtlError] = FedmtlError) -> bytes:
    """The bytes of a small file; one that is missing, unreadable or no small file is an error, with the remedy."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_RECORD + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such file; {remedy}") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause}); {remedy}") from None
    if len(data) > LARGEST_RECORD:
        raise error(f"{path}: is larger than {LARGEST_RECORD >> 20} MB, which no such file is; {remedy}")
    return data


def parse_record(
    kind: type[Record], text: bytes, where: str, remedy: str, error: type[FedmtlError] = FedmtlError
) -> Record:
    """A JSON text as a record of that kind; one with a field too many, too few or of another kind is an error."""
    from pydantic import ValidationError

    try:
        return kind.model_validate_json(text)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
        path = excerpt(".".join(map(str, first["loc"])) or "it")
        raise error(f"{where}: is not one of our files ({path}: {excerpt(first['msg'])}); {remedy}") from None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
