"""Two tokenizations of one text, word by word.

Tokens of two vocabularies do not correspond, words do. A word is what a tokenizer's pre-tokenizer makes one, and its
state is the mean of its pieces' states. Two tokenizations agree where they have as many words, each ending at
the same character; other texts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """One text as one tokenizer sees it, without special tokens: per piece its id, its word, and where it ends."""

    ids: Sequence[int]
    words: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True)
class Aligned:
    """The first `num_words` words of a text: how many pieces they are for the teacher and for the student."""

    num_words: int
    num_teacher: int
    num_student: int


def align(teacher: Pieces, student: Pieces, room_teacher: int, room_student: int) -> Aligned | None:
    """As many whole words as fit both, or nothing where the words differ or not even one fits."""
    ends_teacher, ends_student = _word_ends(teacher), _word_ends(student)
    if ends_teacher is None or not np.array_equal(ends_teacher, ends_student):  # type: ignore[arg-type]
        return None
    num_words = min(_fitting(teacher, room_teacher), _fitting(student, room_student))
    if num_words < 1:
        return None
    return Aligned(num_words, _num_pieces(teacher, num_words), _num_pieces(student, num_words))


def _word_ends(pieces: Pieces) -> np.ndarray | None:
    """Where each word ends in the text; None where there is no word, or words are not numbered 0, 1, 2, ..."""
    words = np.asarray(pieces.words)
    if not len(words) or words[0] != 0:
        return None
    steps = np.diff(words)
    if steps.size and (steps.min() < 0 or steps.max() > 1):
        return None
    last = np.append(steps != 0, True)
    ends: np.ndarray = np.asarray(pieces.ends)[last]
    return ends


def _fitting(pieces: Pieces, room: int) -> int:
    # The word of the first piece without room does not fit.
    return int(pieces.words[room]) if len(pieces.words) > room else int(pieces.words[-1]) + 1


def _num_pieces(pieces: Pieces, num_words: int) -> int:
    return int(np.searchsorted(np.asarray(pieces.words), num_words))
