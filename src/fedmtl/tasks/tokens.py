"""Texts tokenized once and stored on disk; opened as memory maps, so that a worker holds only what it reads.

Tokens decode to the text. So the cache is its owner's only: a folder that others could open is closed when it is used,
and one that belongs to everybody or to another user is refused.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedmtl.errors import ConfigError, FedmtlError, ModelError
from fedmtl.foreign import excerpt
from fedmtl.runs.folder import make_private_folder
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task, Windows
from fedmtl.tasks.windows import NOWHERE, central, cut_text, described
from fedmtl.tasks.words import plain_text, split_words

if TYPE_CHECKING:
    from fedmtl.config import DataConfig

FORMAT = 2
BLOCK = 4096
ARRAYS = ("ids", "segments", "offsets")
TYPES = (np.int32, np.uint8, np.int64)
# Of a task on words: the column of each word's first piece, and where an example's words are among those of all.
WORDS = ("words", "word_offsets")
# Where texts are cut into windows: how many tokens each has, and where an example's windows are among those of all.
CUTS = ("cuts", "cut_offsets")
NO_PIECE = NOWHERE
REMEDY = "delete the folder, the texts are then tokenized again"
_one_reader = threading.Lock()


class Meta(BaseModel):
    """A folder's meta.json: its parts, how many examples were truncated, whether words are marked and windows cut."""

    model_config = ConfigDict(extra="forbid", strict=True)

    parts: int = Field(ge=1, le=2)
    truncated: int = Field(ge=0)
    words: bool = False
    windows: bool = False


@dataclass(frozen=True)
class TokenPart:
    """The tokens of each example, end to end in one array: one sequence, or where it has `cuts` those of its windows.

    `cuts` has the length of every window of an example. Of a task on words, `words` has the column of each word's first
    piece among its example's tokens, or NO_PIECE for a word that was cut off or that the tokenizer leaves nothing of.
    """

    ids: np.ndarray
    segments: np.ndarray
    offsets: np.ndarray
    words: Sequences | None = None
    cuts: Sequences | None = None

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, examples: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = self.offsets[examples + 1] - self.offsets[examples]
        return lengths

    def sequence_lengths(self, examples: np.ndarray | slice = slice(None)) -> np.ndarray:
        """How many tokens each sequence of these examples has, in order."""
        if self.cuts is not None:
            return np.asarray(self.cuts[examples].values)
        return self.lengths()[examples] if isinstance(examples, slice) else self.lengths_of(examples)


@dataclass(frozen=True)
class Tokens:
    """The tokens of all examples of one text set: one part, or two where each text of a pair stands alone."""

    parts: tuple[TokenPart, ...]

    @property
    def words(self) -> Sequences | None:
        """Where the words of each example begin, where the task is on words."""
        return self.parts[0].words

    def lengths(self) -> np.ndarray:
        """How many tokens each example has, of a dual pair the longer text."""
        return self._longest([part.lengths() for part in self.parts])

    def lengths_of(self, examples: np.ndarray) -> np.ndarray:
        return self._longest([part.lengths_of(examples) for part in self.parts])

    @staticmethod
    def _longest(lengths: list[np.ndarray]) -> np.ndarray:
        return lengths[0] if len(lengths) == 1 else np.maximum(*lengths)


def tokenize(
    task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int, cache: Path
) -> tuple[Path, int]:
    """Tokenize unless the cache has it; the folder, and how many examples were truncated."""
    _check_max_length(task, tokenizer, max_length)
    texts = tuple(mend_surrogates(column) for column in texts)
    folder = cache / _digest(task, texts, tokenizer, max_length)
    _close_to_others(cache)
    meta = _read_meta(folder)
    if meta is None:
        # A call leaves its padding and truncation in the tokenizer, and the caller's is saved with the model.
        meta = _write(folder, _encode_parts(task, texts, copy.deepcopy(tokenizer), max_length))
    return folder, meta.truncated


def encode_texts(task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> Tokens:
    """Tokenize in memory, for texts that are read once; leaves its padding and truncation in the tokenizer."""
    _check_max_length(task, tokenizer, max_length)
    mended = tuple(mend_surrogates(column) for column in texts)
    return Tokens(tuple(part for part, _ in _encode_parts(task, mended, tokenizer, max_length)))


def _encode_parts(
    task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int
) -> list[tuple[TokenPart, np.ndarray]]:
    columns = [[text] for text in texts] if task.is_dual else [list(texts)]
    by_word, windows = task.kind_of.by_word, task.windows
    if windows is not None:
        return [_encode_windows(tokenizer, column, max_length, windows, by_word=by_word) for column in columns]
    return [_encode(tokenizer, column, max_length, by_word=by_word) for column in columns]


def _close_to_others(cache: Path) -> None:
    try:
        # The sticky bit marks a folder of everybody's, such as /tmp: closing that one would be no help to anybody.
        if cache.is_dir() and cache.stat().st_mode & stat.S_ISVTX:
            raise FedmtlError(f"data.cache: {cache} is everybody's, and tokens decode to the text; name a folder in it")
        make_private_folder(cache)
    except OSError as error:
        raise FedmtlError(
            f"data.cache: cannot write tokens to {cache} ({error.strerror or error}); free space there, or name a"
            " folder of your own"
        ) from error


def map_array(path: Path) -> np.ndarray:
    """The array in a file as a memory map, of which a process holds what it reads."""
    # Clients of a stack are opened in threads. numpy reads a header with Python's parser, which two threads of
    # CPython 3.11 cannot use at once (python/cpython#106905): one of them gets a SystemError.
    with _one_reader:
        # A plain view of the map: indexing np.memmap itself costs several times as much.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


@lru_cache(maxsize=64)
def open_tokens(folder: Path) -> Tokens:
    """The tokens in a folder that `tokenize` made, as memory maps; one that is broken is an error."""
    meta = _read_meta(folder)
    if meta is None:
        raise FedmtlError(f"{folder}: its meta.json is not ours; {REMEDY}")
    return Tokens(tuple(_open_part(folder, number, meta) for number in range(meta.parts)))


def _open_part(folder: Path, number: int, meta: Meta) -> TokenPart:
    def load(name: str) -> np.ndarray:
        return map_array(folder / f"{number}.{name}.npy")

    try:
        ids, segments, offsets = map(load, ARRAYS)
        words, cuts = (Sequences(*map(load, names)) if has else None for names, has in _extras(meta))
        part = TokenPart(ids, segments, offsets, words, cuts)
    except Exception as error:  # numpy's reader of headers raises any kind
        raise FedmtlError(f"{folder}: holds an array that cannot be read ({excerpt(error)}); {REMEDY}") from error
    arrays = [getattr(part, name) for name in ARRAYS]
    types = [array.dtype == kind and array.ndim == 1 for array, kind in zip(arrays, TYPES, strict=True)]
    is_whole = all(types) and len(part.offsets) > 0 and len(part.ids) == len(part.segments)
    is_whole = is_whole and (part.words is None or _are_words(part, part.words))
    is_whole = is_whole and (part.cuts is None or _are_cuts(part, part.cuts))
    if not is_whole or part.offsets[0] != 0 or part.offsets[-1] != len(part.ids) or (part.lengths() < 0).any():
        raise FedmtlError(f"{folder}: its arrays do not fit each other; {REMEDY}")
    return part


def _extras(meta: Meta) -> list[tuple[tuple[str, str], bool]]:
    """The arrays that only some folders have, and whether this one has them."""
    return [(WORDS, meta.words), (CUTS, meta.windows)]


def _are_rows(part: TokenPart, rows: Sequences) -> bool:
    """Whether they are so many numbers for each of the part's examples."""
    types = rows.values.dtype == np.int32 and rows.offsets.dtype == np.int64
    if not types or len(rows.offsets) != len(part.offsets) or rows.offsets[0] != 0 or (rows.lengths() < 0).any():
        return False
    return int(rows.offsets[-1]) == len(rows.values)


def _are_cuts(part: TokenPart, cuts: Sequences) -> bool:
    """Whether the windows of every example have its tokens, and each of them has one."""
    if not _are_rows(part, cuts) or (cuts.lengths() < 1).any() or (cuts.values < 1).any():
        return False
    ends = np.concatenate([[0], np.cumsum(cuts.values, dtype=np.int64)])
    return bool(np.array_equal(ends[cuts.offsets], part.offsets))


def _are_words(part: TokenPart, words: Sequences) -> bool:
    """Whether the columns of words are columns of the examples' tokens."""
    if not _are_rows(part, words):
        return False
    fits = (words.values >= NO_PIECE) & (words.values < part.lengths()[words.owners()])
    return bool(fits.all())


def token_cache(data: DataConfig) -> Path:
    """The folder of tokens, and of what belongs to them."""
    return Path(data.cache) if data.cache else default_cache()


def default_cache() -> Path:
    base = os.environ.get("FEDMTL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedmtl"
    return Path(base) / "tokens"


def _digest(task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> str:
    python_side = [type(tokenizer).__name__, tokenizer.truncation_side, tokenizer.split_special_tokens]
    given = [FORMAT, max_length, "words" if task.kind_of.by_word else task.is_dual, *python_side]
    given += [] if task.windows is None else [described(task.windows, max_length)]
    backend = _backend(tokenizer.backend_tokenizer.to_str())
    head = [*map(json.dumps, given), backend, json.dumps([len(column) for column in texts])]
    digest = hashlib.sha256(f"[{', '.join(head)}]".encode())
    for column in texts:
        encoded = [text.encode() for text in column]
        # The lengths say where a text ends, whatever characters it holds.
        digest.update(np.asarray([len(text) for text in encoded], dtype="<i8").data)
        digest.update(b"".join(encoded))
    return digest.hexdigest()[:32]


@lru_cache(maxsize=1)
def _backend(serialized: str) -> str:
    backend = json.loads(serialized)
    # Neither has an effect here, and every call of the tokenizer changes them.
    del backend["padding"], backend["truncation"]
    return json.dumps(backend)


def _check_max_length(task: Task, tokenizer: Any, max_length: int) -> None:
    """Raise a ConfigError where no token of a text would be left; the tokenizer then would not truncate at all."""
    if not tokenizer.is_fast:
        raise ModelError("model.server_model: its tokenizer has no tokenizer.json; save it with a fast tokenizer")
    num_texts = 2 if task.is_pair and not task.is_dual else 1
    least = tokenizer.num_special_tokens_to_add(pair=num_texts == 2) + num_texts
    if max_length < least:
        raise ConfigError(f"model.max_length: {max_length} leaves {task.name} no token for text; write {least} or more")


def mend_surrogates(texts: list[str]) -> list[str]:
    """Halves of characters, which JSON can hold and UTF-8 cannot: pairs joined, single ones become U+FFFD."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts]
    return texts


def _encode(
    tokenizer: Any, columns: list[list[str]], max_length: int, *, by_word: bool
) -> tuple[TokenPart, np.ndarray]:
    """The tokens, `by_word` with the first piece of each word, and which examples were truncated."""
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    lengths: list[int] = []
    truncated: list[bool] = []
    words: list[list[int]] = []
    for start in range(0, len(columns[0]), BLOCK):
        block = [column[start : start + BLOCK] for column in columns]
        texts = block[0]
        if by_word:
            block = [list(map(plain_text, texts))]
        # A tokenizer.json may carry fixed padding and truncation: both are always said here.
        encoded = tokenizer(*block, padding=False, truncation=True, max_length=max_length, return_token_type_ids=True)
        ids.extend(np.asarray(row, dtype=np.int32) for row in encoded["input_ids"])
        segments.extend(np.asarray(row, dtype=np.uint8) for row in encoded["token_type_ids"])
        lengths.extend(len(row) for row in encoded["input_ids"])
        truncated.extend(bool(encoding.overflowing) for encoding in encoded.encodings)
        if by_word:
            words.extend(first_pieces(text, each.offsets) for text, each in zip(texts, encoded.encodings, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    empty = [np.zeros(0, dtype=np.int32)]
    marked = Sequences.of(words, np.int32) if by_word else None
    part = TokenPart(np.concatenate(ids or empty), np.concatenate(segments or empty).astype(np.uint8), offsets, marked)
    return part, np.asarray(truncated, dtype=bool)


def _encode_windows(
    tokenizer: Any, columns: list[list[str]], max_length: int, windows: Windows, *, by_word: bool
) -> tuple[TokenPart, np.ndarray]:
    """As `_encode`, with longer texts cut into windows."""
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    cuts: list[list[int]] = []
    truncated: list[bool] = []
    words: list[list[int]] = []
    from_left = tokenizer.truncation_side == "left"
    for start in range(0, len(columns[0]), BLOCK):
        block = [column[start : start + BLOCK] for column in columns]
        texts = block[0]
        if by_word:
            block = [list(map(plain_text, texts))]
        encoded = tokenizer(*block, padding=False, truncation=False, return_token_type_ids=True, verbose=False)
        for number, encoding in enumerate(encoded.encodings):
            row = np.asarray(encoded["input_ids"][number], dtype=np.int32)
            types = np.asarray(encoded["token_type_ids"][number], dtype=np.uint8)
            text_of = np.array([NOWHERE if text is None else text for text in encoding.sequence_ids], dtype=np.int64)
            found = cut_text(text_of, max_length, windows, from_left=from_left)
            ids.extend(row[chosen] for chosen in found.columns)
            segments.extend(types[chosen] for chosen in found.columns)
            cuts.append([len(chosen) for chosen in found.columns])
            truncated.append(found.is_cut)
            if by_word:
                homes = central(found, len(row))
                pieces = first_pieces(texts[number], encoding.offsets)
                words.append([NO_PIECE if piece == NO_PIECE else int(homes[piece]) for piece in pieces])
    lengths = [sum(each) for each in cuts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    joined, types = np.concatenate(ids or [np.zeros(0)]), np.concatenate(segments or [np.zeros(0)])
    marked = Sequences.of(words, np.int32) if by_word else None
    part = TokenPart(joined.astype(np.int32), types.astype(np.uint8), offsets, marked, Sequences.of(cuts, np.int32))
    return part, np.asarray(truncated, dtype=bool)


def first_pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """For each word of a text the column of the first token in it, by the letters that each token stands for.

    A token that stands for no letters, such as one that every sequence begins with, is in no word.
    """
    columns = []
    at, last = 0, len(spans)
    for start, end in split_words(text):
        while at < last and (spans[at][1] <= start or spans[at][0] == spans[at][1]):
            at += 1
        columns.append(at if at < last and spans[at][0] < end else NO_PIECE)
    return columns


def _read_meta(folder: Path) -> Meta | None:
    """What `_write` noted; None where it did not finish."""
    try:
        return Meta.model_validate_json((folder / "meta.json").read_bytes())
    except (OSError, ValueError):
        return None


def _write(folder: Path, encoded: list[tuple[TokenPart, np.ndarray]]) -> Meta:
    """Write all or nothing; return the folder's meta."""
    truncated = np.logical_or.reduce([cut for _, cut in encoded])
    first = encoded[0][0]
    has = {"words": first.words is not None, "windows": first.cuts is not None}
    meta = Meta(parts=len(encoded), truncated=int(truncated.sum()), **has)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokens-", dir=folder.parent) as temporary:
            whole = Path(temporary) / folder.name
            whole.mkdir(mode=0o700)
            for number, (part, _) in enumerate(encoded):
                for name in ARRAYS:
                    np.save(whole / f"{number}.{name}.npy", getattr(part, name))
                for names, rows in ((WORDS, part.words), (CUTS, part.cuts)):
                    for name, array in () if rows is None else zip(names, (rows.values, rows.offsets), strict=True):
                        np.save(whole / f"{number}.{name}.npy", array)
            (whole / "meta.json").write_text(meta.model_dump_json(exclude_defaults=True))
            _put(whole, folder)
    except OSError as error:
        # Another process may have finished the same folder first.
        if _read_meta(folder) is None:
            raise FedmtlError(
                f"data.cache: cannot write tokens to {folder.parent} ({error.strerror or error}); "
                "free space there, or name another folder"
            ) from error
    return meta


def _put(whole: Path, folder: Path) -> None:
    """Move to where nothing is, or where a folder is that nobody finished."""
    try:
        whole.rename(folder)
    except OSError:
        # One process at a time: what was broken a moment ago may be whole by now, and in use.
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _read_meta(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
                whole.rename(folder)
