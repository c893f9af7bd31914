"""What a word is, for tasks that have an answer for every word of a text.

A text whose words are known, such as a sentence of a CoNLL file, has a SEPARATOR behind each of them. In any other text
a word is a run of letters and digits, or one sign.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Between words that a file has apart, where no text has it: the unit separator.
SEPARATOR = "\x1f"
_WORD = re.compile(r"\w+|[^\w\s]")
_SPACES = re.compile(r"\s+")


def join_words(words: Sequence[str]) -> str:
    """A text that `split_words` cuts into these words again; white space in a word becomes one space."""
    return "".join(_SPACES.sub(" ", word) + SEPARATOR for word in words)


def split_words(text: str) -> list[tuple[int, int]]:
    """The first letter of each word of a text and the one behind its last."""
    if not text.endswith(SEPARATOR):
        return [match.span() for match in _WORD.finditer(text)]
    spans, start = [], 0
    for word in text[:-1].split(SEPARATOR):
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return spans


def plain_text(text: str) -> str:
    """The text as a tokenizer and a reader get it: a space between words, and every letter where it was."""
    return text[:-1].replace(SEPARATOR, " ") if text.endswith(SEPARATOR) else text
