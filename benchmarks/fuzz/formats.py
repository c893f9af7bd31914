"""What an input looks like inside: a mutation changes what a reader looks at, and lengths and checksums still fit.

A format makes a new input of an old one (`mutate`). It also takes an input apart into plain parts and knows how to join
them again (`take_apart`), which is how a failing input is shortened.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from fedmtl.federation.wire.frame import CHECKSUM, FRAME, MAGIC, START, VERSION, checksum
from fuzz.mutate import BORDERS, MOST_BYTES, WORDS, mutate_bytes, mutate_json, mutate_text

YAML_WORDS = (
    *WORDS, "&a ", "*a", "*b", "!!float x", "!!int x", "!!binary x", "!!python/object:os.system",
    "!!timestamp 2001-99-99",
    "!!set {a}", "!!omap [a]", "<<: ", "? ", ": ", "- ", "|\n", ">\n", "---\n", "...\n", "%YAML 9.9\n", "!<x> ",
    "2001-01-01", "0o17", "1:30", ".inf", ".nan", "1e5", "2e-5", "{a: &x [1, 2], b: *x}", "&a [*a]", "&a {b: *a}",
    # Each line has eight of the one before; with more of them nobody has the memory.
    "&a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c]",
)  # fmt: skip


Join = Callable[[Sequence[bytes]], bytes]


class Format(Protocol):
    """How inputs of a target are changed."""

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes: ...

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        """The parts of an input, and what makes an input of other parts, with lengths and checksums that fit."""
        ...


class Raw:
    """Bytes of which nothing is known."""

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        return mutate_bytes(data, random, others)

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        return [data], lambda parts: parts[0]


@dataclass(frozen=True)
class Text(Raw):
    """Lines of text; now and then bytes that are none."""

    odd: Sequence[str] = WORDS

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        if random.random() < 0.15:
            return mutate_bytes(data, random, others)
        changed = mutate_text(data.decode("utf-8", "surrogateescape"), random, self.odd)
        return changed.encode("utf-8", "surrogatepass" if random.random() < 0.1 else "replace")


@dataclass(frozen=True)
class Json(Raw):
    """One JSON value, or with `lines` one in every line."""

    lines: bool = False

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        chance = random.random()
        if chance < 0.05:
            return mutate_bytes(data, random, others)
        if chance < 0.15:
            text = data.decode("utf-8", "replace")
            return mutate_text(text, random).encode("utf-8", "replace")
        values = _loaded(random.choice(others)) if others and chance < 0.4 else []
        if not self.lines:
            return mutate_json(data, random, values)
        lines = data.split(b"\n")
        if chance > 0.998:
            # Another column for every line: a table of them has the square of it.
            lines[-1:] = [b'{"k%d":1}' % number for number in range(random.choice((100, 1000, 4000)))]
        for _ in range(random.choice((1, 1, 2, 3))):
            index = random.randrange(len(lines))
            other = random.choice(lines)
            lines[index] = mutate_json(lines[index] if random.random() < 0.8 else other, random, values)
        return b"\n".join(lines)


@dataclass(frozen=True)
class Yaml(Raw):
    """A config: its lines changed, or its values, written as the JSON that YAML reads too."""

    load: Callable[[bytes], Any] = json.loads

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        if random.random() < 0.5:
            return Text(YAML_WORDS).mutate(data, random, others)
        try:
            text = json.dumps(self.load(data))
        except Exception:
            return Text(YAML_WORDS).mutate(data, random, others)
        return mutate_json(text, random, compact=False)


class Frame(Raw):
    """A frame of the wire format; header and tensors are changed inside, then lengths and checksum are mended."""

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        chance = random.random()
        try:
            header, payload = open_frame(data)
        except ValueError:
            chance = 0.0
        if chance < 0.08:
            return mutate_bytes(data, random, others)
        if chance < 0.12:
            deflated = mutate_bytes(zlib.compress(header, 1), random)
            return close_deflated(deflated, payload)
        if chance < 0.16:
            return close_frame(header, payload, (random.choice(BORDERS) % 2**32, random.choice(BORDERS) % 2**64))
        if chance < 0.80:
            header = mutate_json(header, random)
        if chance > 0.70:
            payload = mutate_bytes(payload, random)
        if random.random() < 0.8:
            payload += b"\0" * (-len(payload) % 8)
        return close_frame(header, payload)

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        return list(open_frame(data)), lambda parts: close_frame(parts[0], parts[1])


def open_frame(data: bytes) -> tuple[bytes, bytes]:
    """The header's text and the payload; a ValueError where it is not a frame."""
    try:
        header_length = FRAME.unpack_from(data)[2]
        header = zlib.decompressobj().decompress(data[START : START + header_length], 1 << 22)
    except (struct.error, zlib.error) as error:
        raise ValueError(str(error)) from error
    return header, data[START + header_length :]


def close_frame(header: bytes, payload: bytes, lengths: tuple[int, int] | None = None) -> bytes:
    return close_deflated(zlib.compress(header, 1), payload, lengths)


def close_deflated(deflated: bytes, payload: bytes, lengths: tuple[int, int] | None = None) -> bytes:
    deflated += b"\0" * (-(START + len(deflated)) % 8)
    head = FRAME.pack(MAGIC, VERSION, *(lengths or (len(deflated), len(payload))))
    return head + CHECKSUM.pack(checksum(head, deflated + payload)) + deflated + payload


class Tensors(Raw):
    """A safetensors file: the length of its header, the header as JSON, values."""

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        length = int.from_bytes(data[:8], "little")
        chance = random.random()
        if chance < 0.15 or length + 8 > len(data):
            return mutate_bytes(data, random, others)
        header, values = data[8 : 8 + length], data[8 + length :]
        if chance < 0.85:
            header = mutate_json(header.rstrip(), random)
        if chance > 0.75:
            values = mutate_bytes(values, random)
        if random.random() < 0.9:
            header += b" " * (-len(header) % 8)
        length = len(header) if random.random() < 0.95 else random.choice(BORDERS) % 2**64
        return length.to_bytes(8, "little") + header + values

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        length = int.from_bytes(data[:8], "little")
        if length + 8 > len(data):
            raise ValueError("not a tensor file")
        return [data[8 : 8 + length], data[8 + length :]], _join_tensors


def _join_tensors(parts: Sequence[bytes]) -> bytes:
    return len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]


@dataclass(frozen=True)
class Gzip(Raw):
    """Another format, gzipped; some inputs inflate to much more than they are."""

    content: Format = field(default_factory=Text)

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        chance = random.random()
        try:
            plain = zlib.decompressobj(31).decompress(data, 1 << 22)
        except zlib.error:
            chance = 0.0
        if chance < 0.3:
            return mutate_bytes(data, random, others)
        if chance < 0.31:
            return _bomb(plain, random)
        zipped = gzip.compress(self.content.mutate(plain, random, ()), 1, mtime=0)
        if chance < 0.4:
            return zipped + random.choice((b"\0" * 8, b"x", zipped, zipped[:9], zipped[:-4] + b"\0\0\0\0"))
        return zipped

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        try:
            return [zlib.decompressobj(31).decompress(data, 1 << 22)], lambda parts: gzip.compress(parts[0], 1, mtime=0)
        except zlib.error as error:
            raise ValueError(str(error)) from error


def _bomb(plain: bytes, random: Random) -> bytes:
    """About 400 kB that inflate to 400 MB: one member over and over, which any reader joins."""
    member = gzip.compress((plain + b"a" * 1000) * 400, 9, mtime=0)
    return member * min(random.choice((20, 200, 800)), (2 * MOST_BYTES) // len(member))


class Protobuf(Raw):
    """A message in protobuf's wire format, whose types are not known.

    Fields are dropped, doubled and exchanged, numbers set to borders, and what is nested is changed in the same way.
    """

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        if random.random() < 0.15:
            return mutate_bytes(data, random, others)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = _mutate_fields(data, random)
        return data[:MOST_BYTES]


def replace_fields(body: bytes, values: Mapping[bytes, bytes], depth: int = 0) -> bytes:
    """The message with other values where a field, at any depth that a message of ours has, is one of these."""
    if depth > 20 or not any(old in body for old in values):
        return body
    fields = [
        _Field(each.tag, values.get(each.value) or replace_fields(each.value, values, depth + 1))
        if isinstance(each.value, bytes)
        else each
        for each in _read_fields(body)
    ]
    return b"".join(map(_write_field, fields)) or body


@dataclass
class _Field:
    tag: int
    value: int | bytes


def _mutate_fields(body: bytes, random: Random, depth: int = 0) -> bytes:
    fields = _read_fields(body)
    if not fields:
        return mutate_bytes(body, random) if body else random.choice((b"", b"\x08\x01", b"\x0a\x00", b"\xff" * 11))
    index = random.randrange(len(fields))
    chosen = fields[index]
    kind = random.randrange(12)
    if kind == 0:
        del fields[index]
    elif kind == 1:
        fields[index:index] = [chosen] * random.choice((1, 2, 50, 500))
    elif kind == 2:
        other = random.randrange(len(fields))
        fields[index], fields[other] = fields[other], chosen
    elif kind == 3:
        fields[index] = _Field(random.choice((chosen.tag + 8, 8, 10, 13, 9, 11, 12, 14, 0, 2**29)), chosen.value)
    elif isinstance(chosen.value, int):
        near = chosen.value + random.choice((1, -1))
        fields[index] = _Field(chosen.tag, (random.choice(BORDERS) if kind < 10 else near) % 2**64)
    elif kind < 9 and depth < 12:
        fields[index] = _Field(chosen.tag, _mutate_fields(chosen.value, random, depth + 1))
    elif kind == 9:
        fields[index] = _Field(chosen.tag, random.choice(WORDS).encode("utf-8", "surrogatepass"))
    elif kind == 10:
        fields[index] = _Field(chosen.tag, _deeper(chosen.value, random))
    else:
        fields[index] = _Field(chosen.tag, mutate_bytes(chosen.value, random))
    return b"".join(map(_write_field, fields))


def _deeper(value: bytes, random: Random) -> bytes:
    """A message in a message in a message, as trees of objects are."""
    tag = random.choice((0x0A, 0x12, 0x1A))
    for _ in range(random.choice((3, 50, 150, 600))):
        value = _write_field(_Field(tag, value))
    return value


def _read_fields(body: bytes) -> list[_Field]:
    """The fields of a message; none where it is not one."""
    fields: list[_Field] = []
    offset = 0
    try:
        while offset < len(body):
            tag, offset = _read_varint(body, offset)
            kind = tag & 7
            if kind == 0:
                number, offset = _read_varint(body, offset)
                fields.append(_Field(tag, number))
                continue
            size = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                size, offset = _read_varint(body, offset)
            if size is None or offset + size > len(body):
                return []
            fields.append(_Field(tag, body[offset : offset + size]))
            offset += size
    except IndexError:
        return []
    return fields


def _write_field(each: _Field) -> bytes:
    if isinstance(each.value, int):
        return _varint(each.tag) + _varint(each.value)
    return _varint(each.tag) + (_varint(len(each.value)) if each.tag & 7 == 2 else b"") + each.value


def _read_varint(body: bytes, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = body[offset]
        offset += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return number, offset
        shift += 7


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


# In front of each file of a bundle: its name and its length, in one line.
_FILE = b"\x1c%s %d\n"


def bundle(files: Mapping[str, bytes]) -> bytes:
    """Several files as one input."""
    return b"".join(_FILE % (name.encode(), len(data)) + data for name, data in files.items())


def unbundle(data: bytes) -> dict[str, bytes]:
    """The files of a bundle; of bytes that are none, what can be read as files."""
    files: dict[str, bytes] = {}
    offset = 0
    while data[offset : offset + 1] == b"\x1c":
        end = data.find(b"\n", offset)
        name, _, length = data[offset + 1 : max(end, 0)].decode("utf-8", "replace").rpartition(" ")
        if end < 0 or not length.isascii() or not length.isdigit() or len(length) > 9:
            break
        offset = end + 1 + int(length)
        files[name] = data[end + 1 : offset]
    return files


@dataclass(frozen=True)
class Bundle:
    """Files that belong together, each in some format; `mend` makes digests fit again, most of the time."""

    formats: Mapping[str, Format]
    mend: Callable[[dict[str, bytes]], None] = lambda files: None

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        files = unbundle(data)
        names = [name for name in files if name in self.formats]
        if not names or random.random() < 0.02:
            return mutate_bytes(data, random, others)
        for _ in range(random.choice((1, 1, 1, 2))):
            name = random.choice(names)
            other = unbundle(random.choice(others)) if others and random.random() < 0.2 else {}
            theirs = [other[name]] if name in other else []
            files[name] = self.formats[name].mutate(files[name], random, theirs)
        if random.random() < 0.02:
            del files[random.choice(names)]
        if random.random() < 0.95:
            with contextlib.suppress(Exception):
                self.mend(files)
        return bundle(files)

    def take_apart(self, data: bytes) -> tuple[list[bytes], Join]:
        parts: list[bytes] = []
        ranges: list[tuple[str, int, int, Join]] = []
        for name, content in unbundle(data).items():
            try:
                pieces, join = self.formats.get(name, Raw()).take_apart(content)
            except ValueError:
                pieces, join = Raw().take_apart(content)
            ranges.append((name, len(parts), len(parts) + len(pieces), join))
            parts += pieces
        if not parts:
            raise ValueError("not a bundle")

        def join_files(parts: Sequence[bytes]) -> bytes:
            files = {name: join(parts[start:end]) for name, start, end, join in ranges}
            with contextlib.suppress(Exception):
                self.mend(files)
            return bundle(files)

        return parts, join_files


def mend_digest(files: dict[str, bytes]) -> None:
    """The sha256 that a checkpoint's JSON names is that of its tensor file."""
    for name in files:
        if name.endswith(".json"):
            tensors = files[name.removesuffix(".json") + ".safetensors"]
            record = files[name]
            offset = record.find(b'"sha256":')
            start = record.find(b'"', offset + 9) + 1
            if offset >= 0 and start > 0:
                files[name] = record[:start] + hashlib.sha256(tensors).hexdigest().encode() + record[start + 64 :]


def _loaded(data: bytes) -> list[Any]:
    """Values out of another input, to be put into this one."""
    try:
        value = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return []
    return list(value.values()) if isinstance(value, dict) else [value]
