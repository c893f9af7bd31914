"""The corpus in the tokenizations of teacher and student, end to end in arrays on disk.

The student has its WordPiece vocabulary, in lower case; the same texts give the same pieces and ids. Tokens of
two vocabularies do not correspond, words do. A word is what a tokenizer's pre-tokenizer makes one, and its state is
the mean of its pieces' states. Two tokenizations agree where they have as many words, each ending at the same
character; other texts are left out.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, trainers

from fedmtl.compress.pretrain.corpus import Text
from fedmtl.compress.pretrain.settings import FEWEST_PIECES
from fedmtl.errors import DataError, FedmtlError, ModelError
from fedmtl.model.wordpiece import INSIDE, SPECIAL, make_tokenizer

BLOCK = 4096
SIDES = ("teacher", "student")


def train_vocabulary(texts: Sequence[str], num_pieces: int) -> dict[str, int]:
    """Piece -> id, special tokens first; fewer than `num_pieces` where the texts do not hold as many."""
    tokenizer = make_tokenizer({token: number for number, token in enumerate(SPECIAL)})
    first, inside = _alphabet(tokenizer, texts, num_pieces)
    # The trainer numbers pieces inside words as it meets them in a hash table, and ids break ties between merges.
    # Numbering them beforehand makes it deterministic. They are special to the trainer only, not to the tokenizer.
    numbered = [*SPECIAL, *(INSIDE + character for character in inside)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=num_pieces,
        special_tokens=numbered,
        initial_alphabet=first,
        limit_alphabet=len(first),
        continuing_subword_prefix=INSIDE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _alphabet(tokenizer: Tokenizer, texts: Sequence[str], num_pieces: int) -> tuple[list[str], list[str]]:
    """The characters that begin words and those inside them; rare ones are left to [UNK]."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(tokenizer.normalizer.normalize_str(text).split())
    first: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for word, count in words.items():
        for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word):
            first[part[0]] += count
            for character in part[1:]:
                inside[character] += count
    most = max(FEWEST_PIECES // 3, num_pieces // 20)
    common = sorted(first + inside, key=lambda character: (-(first[character] + inside[character]), character))[:most]
    return sorted(common), sorted(set(common) & set(inside))


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


def align(teacher: Pieces, student: Pieces, most_teacher: int, most_student: int) -> Aligned | None:
    """As many whole words as fit both numbers of pieces, or None where the words differ or not even one fits."""
    ends_teacher, ends_student = _word_ends(teacher), _word_ends(student)
    if ends_teacher is None or not np.array_equal(ends_teacher, ends_student):  # type: ignore[arg-type]
        return None
    num_words = min(_fitting(teacher, most_teacher), _fitting(student, most_student))
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


def _fitting(pieces: Pieces, most: int) -> int:
    # The word of the first piece beyond the limit does not fit.
    return int(pieces.words[most]) if len(pieces.words) > most else int(pieces.words[-1]) + 1


def _num_pieces(pieces: Pieces, num_words: int) -> int:
    return int(np.searchsorted(np.asarray(pieces.words), num_words))


@dataclass(frozen=True)
class Side:
    """All segments of one tokenizer: ids and the word each belongs to, and where each segment begins.

    `before` and `after` are the special tokens around every segment; they are in no array.
    """

    ids: np.ndarray
    words: np.ndarray
    offsets: np.ndarray
    before: tuple[int, ...]
    after: tuple[int, ...]

    def lengths(self) -> np.ndarray:
        """Tokens of each segment, special ones included."""
        return np.diff(self.offsets) + len(self.before) + len(self.after)


@dataclass(frozen=True)
class Segments:
    """Segment n has the same words on both sides; `num_skipped` texts did not align."""

    teacher: Side
    student: Side
    num_words: np.ndarray
    num_skipped: int

    def __len__(self) -> int:
        return len(self.num_words)


def write_segments(
    folder: Path,
    texts: Sequence[Text],
    teacher: Any,
    student: Any,
    max_length: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Tokenize with both tokenizers and write the folder, whole or not at all.

    The special tokens between the texts of a pair are tokens of its segment, and count as a word.
    """
    sides = {"teacher": _plain(teacher), "student": _plain(student)}
    around = {name: _special(tokenizer) for name, tokenizer in sides.items()}
    between = {name: _between(tokenizer) for name, tokenizer in sides.items()}
    limits = [max_length - len(around[name][0]) - len(around[name][1]) for name in SIDES]
    parts: dict[str, list[np.ndarray]] = {f"{side}.{name}": [] for side in SIDES for name in ("ids", "words")}
    counts: dict[str, list[int]] = {"teacher": [], "student": [], "words": []}
    num_skipped = 0
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        for pair in zip(*(_encode(sides[name], block, between[name]) for name in SIDES), strict=True):
            aligned = align(*pair, *limits)
            if aligned is None:
                num_skipped += 1
                continue
            for name, pieces, num in zip(SIDES, pair, (aligned.num_teacher, aligned.num_student), strict=True):
                parts[f"{name}.ids"].append(np.asarray(pieces.ids[:num], dtype=np.int32))
                parts[f"{name}.words"].append(np.asarray(pieces.words[:num], dtype=np.uint16))
                counts[name].append(num)
            counts["words"].append(aligned.num_words)
        report(min(start + BLOCK, len(texts)), len(texts))
    if not counts["words"]:
        raise DataError(
            f"--corpus: none of its {len(texts)} texts has the same words for the teacher and the student; "
            "take a teacher that splits words at spaces and punctuation, as BERT does"
        )
    arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    arrays |= {f"{name}.offsets": np.concatenate([[0], np.cumsum(counts[name])]).astype(np.int64) for name in SIDES}
    arrays["num_words"] = np.asarray(counts["words"], dtype=np.int64)
    _write(folder, arrays, {"num_skipped": num_skipped, "around": around})


def open_segments(folder: Path) -> Segments | None:
    """The segments of a folder that `write_segments` finished, or nothing."""

    def load(name: str) -> np.ndarray:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))

    def side(name: str) -> Side:
        before, after = map(tuple, meta["around"][name])
        return Side(load(f"{name}.ids"), load(f"{name}.words"), load(f"{name}.offsets"), before, after)

    try:
        meta = json.loads((folder / "meta.json").read_text())
        return Segments(side("teacher"), side("student"), load("num_words"), int(meta["num_skipped"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _plain(tokenizer: Any) -> Any:
    """The object of the tokenizers library, without padding and truncation, which a file may have set."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError("--teacher: its tokenizer has no tokenizer.json; save it with a fast tokenizer")
    plain = copy.deepcopy(tokenizer.backend_tokenizer)
    plain.no_padding()
    plain.no_truncation()
    return plain


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    encoded = tokenizer.encode("a")
    marks = encoded.special_tokens_mask
    begin = marks.index(0) if 0 in marks else 0
    end = len(marks) - marks[::-1].index(0) if 0 in marks else len(marks)
    return list(encoded.ids[:begin]), list(encoded.ids[end:])


def _between(tokenizer: Any) -> list[int]:
    """The special tokens between the texts of a pair."""
    encoded = tokenizer.encode("a", "a")
    marks = encoded.special_tokens_mask
    texts = [position for position, mark in enumerate(marks) if not mark]
    inner = range(texts[0], texts[-1]) if texts else ()
    return [encoded.ids[position] for position in inner if marks[position]]


def divider(tokenizer: Any) -> int | None:
    """The token after which a pair's second text begins; None where the tokenizer gives both texts one type."""
    encoded = _plain(tokenizer).encode("a", "a")
    return int(encoded.ids[encoded.type_ids.index(1) - 1]) if 1 in encoded.type_ids else None


def _encode(tokenizer: Any, texts: list[Text], between: list[int]) -> Iterator[Pieces]:
    for text, encoded in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        ids, words, ends = encoded.ids, encoded.word_ids, [end for _, end in encoded.offsets]
        if None in words:
            # A piece that belongs to no word, such as a special token written out in a text, has no partner.
            yield Pieces(ids, [], ends)
        elif isinstance(text, str):
            yield Pieces(ids, words, ends)
        else:
            first = encoded.sequence_ids.index(1) if 1 in encoded.sequence_ids else len(ids)
            num_words = words[first - 1] + 1 if first else 0
            yield Pieces(
                [*ids[:first], *between, *ids[first:]],
                [*words[:first], *[num_words] * len(between), *(num_words + 1 + word for word in words[first:])],
                [*ends[:first], *[0] * len(between), *ends[first:]],
            )


def _write(folder: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".segments-", dir=folder.parent) as temporary:
            whole = Path(temporary) / folder.name
            whole.mkdir()
            for name, array in arrays.items():
                np.save(whole / f"{name}.npy", array)
            (whole / "meta.json").write_text(json.dumps(meta))
            shutil.rmtree(folder, ignore_errors=True)
            whole.rename(folder)
    except OSError as error:
        raise FedmtlError(
            f"--work: cannot write to {folder.parent} ({error.strerror or error}); free space, or name another folder"
        ) from error
