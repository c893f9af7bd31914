"""Mutations of bytes, of text and of JSON values; every choice comes from the given random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# An input is never longer than this: what is large in itself says nothing about a reader.
MOST_BYTES = 1 << 20

BORDERS = (
    0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 300, 301, 1000, 1001, 32767, 32768, 65535, 65536, 2**24, 2**25, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63),
    -(2**63) - 1, 10**18, 10**30, 10**308, 10**309, 10**400,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 1e-9, 1e-320, 5e-324, 1e15, 1e16, 1e154, 1e155, 1e200, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
WORDS = (
    "", " ", "\n", "\t", "\0", "a", "0", "-1", "1e400", "nan", "None", "true", "null", "*", "**", "[", "{}", "..", ".",
    "/", "../../x", "/etc/passwd", "C:\\x", "~", "$HOME", "%s%n", "{0}", "<b>", "<script>", "[/b]", "[bold]", "--", "'",
    '"', "\\", ",", ";", "=", "\x1b[31m", "\x1b]0;x\x07", "\r", "\u2028", "\u0085", "\u202e", "\ufeff", "\ufffd",
    "\u0301", "é", "ß", "\u0130", "٣", "１", "²", "😀", "\ud800", "\udfff", "client:x", "task:", "group:", "fixed",
    "heads.", "heads.x", "all", "a|b", "a" * 301, "b" * 5000, "(" * 3000, "a?" * 25 + "a" * 25, "*a" * 30,
)  # fmt: skip
# Text that `json.dumps` cannot write.
RAW = (
    "NaN", "Infinity", "-Infinity", "-0", "1e999", "-1e999", "1E-999", "9" * 4301, "-" + "9" * 5000, "1." + "0" * 5000,
    "[" * 400 + "]" * 400, "[" * 2000, "[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500, '{"a":1,"a":2}',
    '{"":0,"":1}', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', "01", "0x10", "+1", ".5", "1.", "'a'", "True",
    "undefined", "/*a*/", "", "\ufeff", ",", "]", "}", '"', "\\", "--1", "1 2",
)  # fmt: skip
MARK = "\x1araw{}\x1a"
# Behind a key that stands twice; `dump_json` takes it off.
SAME = "\x1asame\x1a"


def mutate_bytes(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """One to four changes of bytes: flips, borders of integers, cuts, repetitions, and parts of other inputs."""
    changed = bytearray(data)
    for _ in range(_few(random)):
        random.choice(_BYTE_CHANGES)(changed, random, others)
    return bytes(changed[:MOST_BYTES])


def mutate_text(text: str, random: Random, odd: Sequence[str] = WORDS) -> str:
    """Changes that keep a text a text: odd words and numbers put in, parts and lines dropped, doubled or exchanged."""
    for _ in range(_few(random)):
        text = random.choice(_TEXT_CHANGES)(text, random, odd)[:MOST_BYTES]
    return text


def mutate_json(text: str | bytes, random: Random, others: Sequence[Any] = (), compact: bool = True) -> bytes:
    """A JSON text with some of its values changed; where it is not JSON, its text is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return mutate_text(words, random).encode("utf-8", "surrogatepass")
    return dump_json(mutate_value(value, random, others), compact)


def dump_json(value: Any, compact: bool = True) -> bytes:
    """A value as JSON, with the raw text that `mutate_value` stands for."""
    try:
        text = json.dumps(value, separators=(",", ":") if compact else (", ", ": "))
    except (ValueError, RecursionError):
        return b"[]"
    if "\\u001araw" in text:
        for number, raw in enumerate(RAW):
            text = text.replace(json.dumps(MARK.format(number)), raw)
    if "\\u001asame" in text:
        text = text.replace(json.dumps(SAME)[1:-1], "")
    return text.encode()


def mutate_value(value: Any, random: Random, others: Sequence[Any] = ()) -> Any:
    """A value of JSON's types with one to four changes somewhere in it; the given one may be changed too."""
    for _ in range(_few(random)):
        value = _change_somewhere(value, random, others)
    return value


def odd_value(random: Random) -> Any:
    """A value that readers do not expect, of any type."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(BORDERS)
    if kind < 5:
        return random.choice(FLOATS)
    if kind < 7:
        return random.choice(WORDS)
    if kind < 9:
        return MARK.format(random.randrange(len(RAW)))
    if kind == 9:
        return random.choice(([], {}, [[]], [None], {"": None}, [0] * 1000, [[0, 0]] * 20, [{}] * 3, [[1], [2, 3]]))
    if kind == 10:
        return _nested(random)
    return random.choice((None, True, False))


def _few(random: Random) -> int:
    return random.choice((1, 1, 1, 1, 2, 2, 3, 4))


def _change_somewhere(value: Any, random: Random, others: Sequence[Any]) -> Any:
    if isinstance(value, dict) and value and random.random() > 0.12:
        key = random.choice(list(value))
        if random.random() < 0.2:
            _change_keys(value, key, random)
        else:
            value[key] = _change_somewhere(value[key], random, others)
        return value
    if isinstance(value, list) and value and random.random() > 0.2:
        index = random.randrange(len(value))
        if random.random() < 0.25:
            _change_items(value, index, random)
        else:
            value[index] = _change_somewhere(value[index], random, others)
        return value
    return _changed(value, random, others)


def _change_keys(value: dict[str, Any], key: str, random: Random) -> None:
    kind = random.randrange(5)
    if kind == 0:
        del value[key]
    elif kind == 1:
        value[random.choice(WORDS)] = value.pop(key)
    elif kind == 2:
        other = random.choice(list(value))
        value[key], value[other] = value[other], value[key]
    elif kind == 3:
        value[random.choice(WORDS)] = value[key]
    else:
        value[key + SAME] = odd_value(random)


def _change_items(value: list[Any], index: int, random: Random) -> None:
    kind = random.randrange(5)
    if kind == 0:
        del value[index]
    elif kind == 1:
        value.insert(index, odd_value(random))
    elif kind == 2:
        value[index:index] = [value[index]] * random.choice((1, 2, 30, 300))
    elif kind == 3:
        other = random.randrange(len(value))
        value[index], value[other] = value[other], value[index]
    else:
        del value[index:]


def _changed(value: Any, random: Random, others: Sequence[Any]) -> Any:
    """Another value instead: near to it, of another type, odd, or out of another input."""
    kind = random.randrange(10)
    if kind < 4:
        return odd_value(random)
    if kind < 7:
        return _near(value, random)
    if kind == 7 and others:
        return random.choice(others)
    return random.choice((str, _wrapped, _keyed, lambda v: None, lambda v: True, lambda v: [v, v]))(value)


def _near(value: Any, random: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + random.choice((1, -1, 2, 1000, -1000)) if random.random() < 0.7 else -value
    if isinstance(value, float):
        return value * random.choice((-1.0, 0.0, 2.0, 1.0000001, 1e10, 1e300)) if random.random() < 0.8 else str(value)
    if isinstance(value, str):
        return mutate_text(value, random)
    return odd_value(random)


def _wrapped(value: Any) -> Any:
    return [value]


def _keyed(value: Any) -> Any:
    return {"a": value}


def _nested(random: Random) -> Any:
    value: Any = random.choice((0, "", None))
    for _ in range(random.choice((2, 9, 60, 300))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def _flip(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set_byte(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x0A, random.randrange(256)))


def _set_integer(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    """Lengths and counts are integers somewhere, of some size, in one order or the other."""
    size = random.choice((1, 2, 4, 8))
    if len(data) >= size:
        offset = random.randrange(len(data) - size + 1)
        order = random.choice(("little", "little", "big"))
        if random.random() < 0.5:
            before = int.from_bytes(data[offset : offset + size], order)
            number = before + random.choice((1, -1, 8, -8, 256))
        else:
            number = random.choice(BORDERS)
        data[offset : offset + size] = (number % (1 << 8 * size)).to_bytes(size, order)


def _delete(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    del data[start:end]


def _truncate(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    del data[random.randrange(len(data) + 1) :]


def _repeat(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    times = random.choice((1, 1, 2, 5, 50, 1000))
    data[start:start] = bytes(data[start:end]) * min(times, MOST_BYTES // 4 // max(1, end - start))


def _insert(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    offset = random.randrange(len(data) + 1)
    new = random.choice((b"\0", b"\xff" * 8, b"\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", random.randbytes(4)))
    data[offset:offset] = new


def _move(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    part = data[start:end]
    del data[start:end]
    offset = random.randrange(len(data) + 1)
    data[offset:offset] = part


def _splice(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    if not others:
        return _flip(data, random, others)
    other = random.choice(others)
    start, end = _part(data, random)
    other_start, other_end = _part(other, random)
    data[start:end] = other[other_start:other_end]
    return None


_BYTE_CHANGES: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    _flip, _flip, _set_byte, _set_byte, _set_integer, _set_integer, _delete, _truncate, _repeat, _insert, _move,
    _splice,
)  # fmt: skip


def _part(data: bytes | bytearray, random: Random) -> tuple[int, int]:
    if not data:
        return 0, 0
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice((1, 2, 4, 8, 16, 64, 256, len(data))))


def _put_word(text: str, random: Random, odd: Sequence[str]) -> str:
    offset = random.randrange(len(text) + 1)
    return text[:offset] + random.choice(odd) + text[offset:]


def _replace_word(text: str, random: Random, odd: Sequence[str]) -> str:
    words = text.split(" ")
    words[random.randrange(len(words))] = random.choice(odd)
    return " ".join(words)


def _replace_number(text: str, random: Random, odd: Sequence[str]) -> str:
    digits = [offset for offset, letter in enumerate(text[:5000]) if letter.isdigit()]
    if not digits:
        return _put_word(text, random, odd)
    start = end = random.choice(digits)
    while end < len(text) and text[end] in "0123456789.eE_":
        end += 1
    number = random.choice((*RAW[:10], "-1", "0", "1_0", "1e400", "٣", *map(str, BORDERS[:10])))
    return text[:start] + number + text[end:]


def _drop_part(text: str, random: Random, odd: Sequence[str]) -> str:
    start = random.randrange(len(text) + 1)
    return text[:start] + text[start + random.choice((1, 1, 2, 5, 20, 100)) :]


def _cut(text: str, random: Random, odd: Sequence[str]) -> str:
    return text[: random.randrange(len(text) + 1)]


def _repeat_part(text: str, random: Random, odd: Sequence[str]) -> str:
    start = random.randrange(len(text) + 1)
    part = text[start : start + random.choice((1, 3, 10, 100))]
    # Now and then as many as fit: what is done for each column or key with all the others shows then.
    times = MOST_BYTES // max(1, len(part)) if random.random() < 0.005 else random.choice((2, 2, 10, 1000))
    return text[:start] + part * times + text[start:]


def _change_lines(text: str, random: Random, odd: Sequence[str]) -> str:
    lines = text.split("\n")
    index, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.randrange(5)
    if kind == 0:
        del lines[index]
    elif kind == 1:
        lines.insert(other, lines[index])
    elif kind == 2:
        lines[index], lines[other] = lines[other], lines[index]
    elif kind == 3:
        lines[index] = random.choice((" ", "  ", "\t", "- ", "# ")) + lines[index]
    else:
        lines[index] = random.choice(odd)
    return "\n".join(lines)


_TEXT_CHANGES: tuple[Callable[[str, Random, Sequence[str]], str], ...] = (
    _put_word, _put_word, _replace_word, _replace_number, _drop_part, _cut, _repeat_part, _change_lines, _change_lines,
)  # fmt: skip
