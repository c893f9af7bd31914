"""Tags of words as spans: IOB1, IOB2 and IOBES, as strictly as they are defined or by the rule that takes anything.

A span is (type, first word, word behind the last). The lenient rule is that of conlleval and of seqeval's default mode:
a B- or S- begins a span, and so does an I- or E- behind no tag of its type; the strict one is seqeval's strict mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Span = tuple[str, int, int]
Scheme = Literal["IOB1", "IOB2", "IOBES"]
OUTSIDE = "O"
PREFIXES = "BIES"
# BILOU says L and U for E and S.
_OTHER_NAMES = {"L": "E", "U": "S"}


def split_tag(tag: str) -> tuple[str, str] | None:
    """A tag's prefix and its type, ("O", "") of O; None where it is no tag."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, mark, kind = tag.partition("-")
    prefix = _OTHER_NAMES.get(prefix, prefix)
    return (prefix, kind) if mark and kind.strip() and len(prefix) == 1 and prefix in PREFIXES else None


def lenient_spans(tags: Sequence[tuple[str, str]]) -> list[Span]:
    """The spans of split tags by the rule that takes anything."""
    spans: list[Span] = []
    start, before, kind = 0, OUTSIDE, ""
    for at, (prefix, other) in enumerate([*tags, (OUTSIDE, "")]):
        ends = before != OUTSIDE and (before in "ES" or prefix in "BSO" or other != kind)
        if ends:
            spans.append((kind, start, at))
        if prefix != OUTSIDE and (before == OUTSIDE or ends):
            start = at
        before, kind = prefix, other
    return spans


def strict_spans(tags: Sequence[tuple[str, str]], scheme: Scheme) -> list[Span]:
    """The spans of split tags that are whole by a scheme; what is not is none."""
    ended = [*tags, (OUTSIDE, "")]
    spans: list[Span] = []
    at, before = 0, (OUTSIDE, "")
    while at < len(ended):
        if not _starts(before, ended[at], scheme):
            before, at = ended[at], at + 1
            continue
        start = at
        at += 1
        while at < len(ended) and _goes_on(ended[at - 1], ended[at], scheme):
            at += 1
        before = ended[at - 1]
        if _is_whole(before, ended[at], scheme):
            spans.append((ended[start][1], start, at))
    return spans


def _starts(before: tuple[str, str], tag: tuple[str, str], scheme: Scheme) -> bool:
    if scheme == "IOB2":
        return tag[0] == "B"
    if scheme == "IOBES":
        return tag[0] in "BS"
    is_same = before[1] == tag[1]
    if tag[0] == "I":
        return before[0] in "OB" or not is_same
    return tag[0] == "B" and before[0] in "IB" and is_same


def _goes_on(before: tuple[str, str], tag: tuple[str, str], scheme: Scheme) -> bool:
    inside = "IE" if scheme == "IOBES" else "I"
    return before[0] in "BI" and tag[0] in inside and tag[1] == before[1]


def _is_whole(last: tuple[str, str], behind: tuple[str, str], scheme: Scheme) -> bool:
    if scheme == "IOBES":
        return last[0] in "ES"
    # In IOB1 a B- means that the span before it has its type.
    return scheme == "IOB2" or not (last[0] == behind[0] == "B" and last[1] != behind[1])


def found_scheme(texts: Iterable[Sequence[tuple[str, str]]]) -> Scheme:
    """The scheme that tags are written in: IOBES where there is an E- or S-, IOB1 where no span needs its B-."""
    begins_inside = needs_begin = False
    for tags in texts:
        before = (OUTSIDE, "")
        for tag in tags:
            if tag[0] in "ES":
                return "IOBES"
            begins_inside |= tag[0] == "I" and before[1] != tag[1]
            needs_begin |= tag[0] == "B" and before[1] != tag[1]
            before = tag
    return "IOB1" if begins_inside and not needs_begin else "IOB2"


def misplaced(tags: Sequence[tuple[str, str]], scheme: Scheme) -> int | None:
    """The first tag that cannot stand where it does by a scheme, such as an I- behind O; None where all may."""
    open_at = None
    before = (OUTSIDE, "")
    for at, tag in enumerate(tags):
        follows = before[0] in ("BI" if scheme == "IOBES" else "BIES") and before[1] == tag[1]
        if tag[0] in "IE" and not follows and scheme != "IOB1":
            return at
        if open_at is not None and not (follows and tag[0] in "IE"):
            return open_at
        open_at = at if scheme == "IOBES" and tag[0] in "BI" else None
        before = tag
    return open_at


def to_iob2(spans: Iterable[Span], num_words: int) -> list[str]:
    """One tag for every word."""
    tags = [OUTSIDE] * num_words
    for kind, start, end in spans:
        tags[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    return tags
