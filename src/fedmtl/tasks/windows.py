"""Texts that are longer than a sequence, cut into windows: sequences of one owner, which may overlap.

The first window begins with the text, each further one `stride` tokens after the one before, and the last one ends
with the text, so that all windows of a cut text are full. Special tokens stand in each of them, and so does the
shorter text of a pair that is read as one sequence: it is the longer one that is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Windows

NOWHERE = -1


@dataclass(frozen=True)
class CutText:
    """The tokens of each window of one example, as columns of the whole; `is_cut` where some are in none."""

    columns: list[np.ndarray]
    is_cut: bool


def cut_text(text_of: np.ndarray, max_length: int, windows: Windows, *, from_left: bool) -> CutText:
    """Cut one example: `text_of` has for each token which text it is of (0, 1), or NOWHERE for a special one.

    With `from_left` windows are counted from the text's end, and what is cut is its beginning.
    """
    if len(text_of) <= max_length:
        return CutText([np.arange(len(text_of))], is_cut=False)
    texts = [np.flatnonzero(text_of == number) for number in (0, 1)]
    budget = max_length - int((text_of == NOWHERE).sum())
    longer = int(len(texts[1]) >= len(texts[0]))
    # Two long texts share the sequence, as they do where nothing has windows.
    most = budget // 2
    is_cut = len(texts[1 - longer]) > most
    shorter = texts[1 - longer][-most:] if from_left else texts[1 - longer][:most]
    size = budget - len(shorter)
    starts, is_short = _starts(len(texts[longer]), size, windows)
    if from_left:
        starts = len(texts[longer]) - size - starts[::-1]
    stays = text_of == NOWHERE
    stays[shorter] = True
    columns = []
    for start in starts.tolist():
        chosen = stays.copy()
        chosen[texts[longer][start : start + size]] = True
        columns.append(np.flatnonzero(chosen))
    return CutText(columns, is_cut or is_short)


def _starts(length: int, size: int, windows: Windows) -> tuple[np.ndarray, bool]:
    """Where the windows of a text begin, and whether some of it is in none."""
    step = min(windows.stride or size, size)
    needed = 1 + -(-(length - size) // step)
    starts = np.arange(min(needed, windows.most)) * step
    if needed <= windows.most:
        starts[-1] = length - size
    return starts, needed > windows.most


def central(text: CutText, length: int) -> np.ndarray:
    """For each token of the whole its index among the tokens of all windows end to end, where it stands most central.

    NOWHERE for a token that is in no window; of two windows that are alike the first counts.
    """
    found = np.full(length, NOWHERE, np.int64)
    nearest = np.full(length, np.inf)
    begin = 0
    for columns in text.columns:
        at = np.arange(len(columns))
        distance = np.abs(at - (len(columns) - 1) / 2)
        is_nearer = distance < nearest[columns]
        nearest[columns[is_nearer]] = distance[is_nearer]
        found[columns[is_nearer]] = begin + at[is_nearer]
        begin += len(columns)
    return found


def rows_of_texts(cuts: Sequences) -> np.ndarray:
    """Which rows of a batch are each text's windows: (texts, most), filled up with NOWHERE; rows follow each other."""
    counts = cuts.lengths()
    columns = np.arange(int(counts.max(initial=1)))
    firsts = cuts.offsets[:-1, None]
    return np.where(columns < counts[:, None], firsts + columns, NOWHERE)


def count_windows(cuts: Sequences | None, examples: np.ndarray) -> tuple[int, int]:
    """How many of these examples have several windows, and how many windows those have together."""
    if cuts is None:
        return 0, 0
    counts = cuts.lengths()[examples]
    return int((counts > 1).sum()), int(counts[counts > 1].sum())


def described(windows: Windows, max_length: int) -> dict[str, Any]:
    """What decides how texts are cut, for the name of their tokens."""
    return {"length": max_length, "stride": windows.stride, "most": windows.most}
