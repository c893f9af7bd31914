"""A frame: a header of plain values and some tensors as bytes, with a checksum over both.

magic version reserved  header length  payload length  checksum | header (JSON, deflated) | tensors, 8-byte aligned

The checksum runs at the speed of memory: the words of a message are added along both sides of a table, and the sums
summed. A change shows in the sums unless it cancels out in every row and every column, and their crc32 misses it once
in 2**32 times. The crc32 of all bytes would take more time than all else that is done to encode a message.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedmtl.config import WireConfig
from fedmtl.errors import WireError
from fedmtl.federation.wire.codecs import DTYPES, ITEM_SIZES, Bytes, Coded, CodedTensors, check, encode_tensors
from fedmtl.sharing.plan import Key, Weights

# Words of 8 bytes in a row: 8 kB.
WIDTH = 1024
MAGIC = b"FMTL"
VERSION = 4
FRAME = struct.Struct("<4sBxxxIQ")
CHECKSUM = struct.Struct("<I")
START = FRAME.size + CHECKSUM.size
MAX_BYTES = WireConfig().max_bytes
# Predictions that clients share are in the header, so it may be large; what it inflates to is bounded twice.
MAX_HEADER = 1 << 25
MAX_INFLATION = 64
# What JSON takes in memory follows from how many values it has: `[],` is three letters and sixty bytes.
MOST_VALUES, MOST_LISTS = 2_000_000, 250_000
MAX_DIMENSIONS = 8
MOST_LETTERS = 300
ALIGN = 8
# A buffer of that many bytes, with anything in it.
Memory = Callable[[int], Bytes]


def checksum(head: memoryview | bytes, body: memoryview | bytes) -> int:
    """Of two parts: the head byte for byte, the body by its sums, and what does not fill a row byte for byte."""
    num_rows = len(body) // (8 * WIDTH)
    end = num_rows * 8 * WIDTH
    crc = zlib.crc32(head)
    if num_rows:
        table = np.frombuffer(body[:end], dtype="<u8").reshape(num_rows, WIDTH)
        for axis in (0, 1):
            crc = zlib.crc32(table.sum(axis=axis, dtype=np.uint64).data, crc)
    return zlib.crc32(body[end:], crc)


if sys.byteorder != "little":
    raise ImportError("fedmtl's wire format needs a little-endian machine")


class ReusedMemory:
    """Memory for one frame after another: each is valid until the next is made."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)

    def __call__(self, size: int) -> Bytes:
        if len(self._buffer) < size:
            # Clients differ a little in size: some bytes more spare the next one a new buffer.
            self._buffer = np.empty(size + size // 8, dtype=np.uint8)
        return self._buffer[:size]


def fresh_memory(size: int) -> Bytes:
    # numpy asks for large pages, which a bytearray does not: more than twice as fast for large models.
    return np.empty(size, dtype=np.uint8)


def pack(
    header: Mapping[str, Any],
    tensors: Mapping[Key, Tensor],
    max_bytes: int = MAX_BYTES,
    memory: Memory = fresh_memory,
) -> Bytes:
    """One frame; tensors keep their order, and their bits unless they are encoded already."""
    table: list[list[Any]] = []
    payload: list[Bytes] = []
    payload_length = 0
    for key, coded in encode_tensors(tensors).coded.items():
        table.append([key.scope, key.name, coded.codec, coded.dtype, list(coded.shape), len(coded.data)])
        payload.append(coded.data)
        payload_length += len(coded.data) + -len(coded.data) % ALIGN
    text = json.dumps({**header, "tensors": table}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER or _has_too_many_values(text):
        raise WireError(
            f"a message's header has {len(text)} bytes, at most {MAX_HEADER} and {MOST_VALUES} values can be sent; if"
            " clients share their predictions, turn evaluation.share_pairs off"
        )
    deflated = zlib.compress(text)
    deflated += b"\0" * (-(START + len(deflated)) % ALIGN)
    if len(deflated) + payload_length > max_bytes:
        raise WireError(f"a message of {len(deflated) + payload_length} bytes is over wire.max_bytes, {max_bytes}")
    head = FRAME.pack(MAGIC, VERSION, len(deflated), payload_length)
    return _filled(memory(START + len(deflated) + payload_length), head, deflated, payload)


def _filled(frame: Bytes, head: bytes, header: bytes, payload: list[Bytes]) -> Bytes:
    offset = START + len(header)
    frame[START:offset] = np.frombuffer(header, dtype=np.uint8)
    for data in payload:
        frame[offset : offset + len(data)] = data
        padding = -len(data) % ALIGN
        offset += len(data) + padding
        frame[offset - padding : offset] = 0
    frame[:START] = np.frombuffer(head + CHECKSUM.pack(checksum(head, frame[START:].data)), dtype=np.uint8)
    return frame


def unpack(data: Any, max_bytes: int = MAX_BYTES) -> tuple[dict[str, Any], Weights]:
    """The header and the tensors of a frame; exact ones are views of `data`. Anything else is a WireError."""
    header, tensors = read_frame(data, max_bytes)
    return header, dict(tensors)


def read_frame(
    data: Any, max_bytes: int = MAX_BYTES, max_tensor_bytes: int | None = None
) -> tuple[dict[str, Any], CodedTensors]:
    """As `unpack`, with the tensors checked and still encoded.

    `max_bytes` bounds the message, and its tensors once they are decoded unless `max_tensor_bytes` does.
    """
    view = memoryview(data).cast("B")
    text, payload = _split(view, max_bytes)
    try:
        header = json.loads(text)
        table = header.pop("tensors")
        tensors = _read_table(table, payload, max_bytes if max_tensor_bytes is None else max_tensor_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise WireError(f"the frame's header is not whole: {brief(error)}") from error
    return header, tensors


def brief(error: Exception) -> str:
    """The error in a line; it may quote what a stranger sent."""
    return repr(error)[:MOST_LETTERS]


def _split(view: memoryview, max_bytes: int) -> tuple[bytes, memoryview]:
    """The header's text and the payload of a frame whose lengths and checksum fit."""
    if len(view) < START:
        raise WireError("the message is shorter than a frame")
    magic, version, header_length, payload_length = FRAME.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise WireError("the message is not a fedmtl frame of this version")
    total = header_length + payload_length
    if START + total != len(view):
        raise WireError(f"the frame says {total} bytes, {len(view) - START} came")
    if total > max_bytes:
        raise WireError(f"the message has {total} bytes, wire.max_bytes is {max_bytes}")
    if checksum(view[: FRAME.size], view[START:]) != CHECKSUM.unpack_from(view, FRAME.size)[0]:
        raise WireError("the message's checksum does not fit")
    return _inflated(view[START : START + header_length]), view[START + header_length :]


def _inflated(deflated: memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(deflated, min(MAX_HEADER, MAX_INFLATION * len(deflated)))
    except zlib.error as error:
        raise WireError(f"the frame's header is not whole: {error}") from error
    if not stream.eof or len(stream.unused_data) >= ALIGN:
        raise WireError("the frame's header is not whole, or too large")
    if _has_too_many_values(text):
        raise WireError("the frame's header has too many values")
    return text


def _has_too_many_values(text: bytes) -> bool:
    return text.count(b",") > MOST_VALUES or text.count(b"[") + text.count(b"{") > MOST_LISTS


def _read_table(table: list[list[Any]], payload: memoryview, max_bytes: int) -> CodedTensors:
    tensors: dict[Key, Coded] = {}
    array = np.frombuffer(payload, dtype=np.uint8) if len(payload) else np.empty(0, dtype=np.uint8)
    offset = decoded = 0
    for scope, name, codec, dtype, shape, length in table:
        if not all(map(is_name, (scope, name, codec, dtype))) or dtype not in DTYPES:
            raise ValueError(f"a tensor is described by {scope!r}, {name!r}, {codec!r}, {dtype!r}")
        if not _is_size(length) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
            raise ValueError(f"{name} has the shape {shape!r} in {length!r} bytes")
        decoded += claimed_bytes(shape, dtype)
        if decoded > max_bytes:
            raise ValueError(f"its tensors would take more than {max_bytes} bytes")
        if offset + length > len(payload):
            raise ValueError(f"{name}: {length} bytes at {offset} do not fit into {len(payload)}")
        key = Key(scope, name)
        if key in tensors:
            raise ValueError(f"{name} of scope {scope} came twice")
        tensors[key] = Coded(codec, dtype, tuple(shape), array[offset : offset + length])
        check(tensors[key])
        offset += length + -length % ALIGN
    if offset != len(payload):
        raise ValueError(f"{len(payload)} bytes of tensors came, {offset} are described")
    return CodedTensors(tensors)


def claimed_bytes(shape: Sequence[int], dtype: str) -> int:
    """What counts for the limit: zeros do not, as a tensor of no values still has to have a shape that exists."""
    return math.prod(max(1, size) for size in shape) * ITEM_SIZES[dtype]


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_LETTERS


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0
