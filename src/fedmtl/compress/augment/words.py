"""The words of a text that may be replaced, and the text with some of them replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
# Words whose neighbours in any table turn a sentence around; TinyBERT's code leaves the same kinds alone.
STOP_WORDS = frozenset(
    re.findall(
        r"\S+",
        """
        a about above after again against all am an and any are aren't as at be because been before being below between
        both but by can can't cannot could couldn't did didn't do does doesn't doing don't down during each few for from
        further had hadn't has hasn't have haven't having he her here hers herself him himself his how i if in into is
        isn't it it's its itself just me more most mustn't my myself no nor not now of off on once only or other our
        ours ourselves out over own same shan't she should shouldn't so some such than that the their theirs them
        themselves then there these they this those through to too under until up very was wasn't we were weren't what
        when where which while who whom why will with won't would wouldn't you your yours yourself yourselves
        """,
    )
)


@dataclass(frozen=True)
class Word:
    """A word and where it stands in its text."""

    start: int
    end: int
    text: str

    @property
    def lower(self) -> str:
        return self.text.lower().replace("’", "'")


def find_words(text: str) -> list[Word]:
    """The words in their order, without numbers and stop words."""
    found = [Word(match.start(), match.end(), match[0]) for match in WORD.finditer(text)]
    return [word for word in found if word.lower not in STOP_WORDS]


def replace_words(text: str, words: Sequence[Word], replacements: Sequence[str | None]) -> str:
    """The text with these words replaced, where there is a replacement; all else stays as it is."""
    parts: list[str] = []
    end = 0
    for word, other in zip(words, replacements, strict=True):
        if other is not None:
            parts += [text[end : word.start], like(word.text, other)]
            end = word.end
    return "".join([*parts, text[end:]])


def like(word: str, other: str) -> str:
    """The other word with the first one's capitals, where it has none of its own."""
    if not other.islower():
        return other
    if word.isupper() and len(word) > 1:
        return other.upper()
    return other[0].upper() + other[1:] if word[0].isupper() else other
