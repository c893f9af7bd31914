"""Texts tokenized once and kept on disk; opened as memory maps, so that a worker holds only what it reads."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.config import DataConfig
from fedmtl.errors import ConfigError, FedmtlError, ModelError
from fedmtl.tasks.task import Task

FORMAT = 2
BLOCK = 4096
ARRAYS = ("ids", "segments", "offsets")


@dataclass(frozen=True)
class TokenPart:
    """One token sequence per example, end to end in one array."""

    ids: np.ndarray
    segments: np.ndarray
    offsets: np.ndarray

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, examples: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = self.offsets[examples + 1] - self.offsets[examples]
        return lengths


@dataclass(frozen=True)
class Tokens:
    """The tokens of all examples of one text set: one part, or two where each text of a pair stands alone."""

    parts: tuple[TokenPart, ...]

    def lengths(self) -> np.ndarray:
        """The longest sequence of each example."""
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
    _check_room(task, tokenizer, max_length)
    texts = tuple(mend_surrogates(column) for column in texts)
    folder = cache / _digest(task, texts, tokenizer, max_length)
    meta = _read_meta(folder)
    if meta is None:
        columns = [[text] for text in texts] if task.is_dual else [list(texts)]
        meta = _write(folder, [_encode(tokenizer, column, max_length) for column in columns])
    return folder, meta["truncated"]


@lru_cache(maxsize=64)
def open_tokens(folder: Path) -> Tokens:
    """The tokens in a folder that `tokenize` made, as memory maps."""
    num_parts = json.loads((folder / "meta.json").read_text())["parts"]

    def load(part: int, name: str) -> np.ndarray:
        # A plain view of the map: indexing np.memmap itself costs several times as much.
        return np.asarray(np.load(folder / f"{part}.{name}.npy", mmap_mode="r"))

    return Tokens(tuple(TokenPart(*(load(part, name) for name in ARRAYS)) for part in range(num_parts)))


def token_cache(data: DataConfig) -> Path:
    """The folder of tokens, and of what belongs to them."""
    return Path(data.cache) if data.cache else default_cache()


def default_cache() -> Path:
    base = os.environ.get("FEDMTL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedmtl"
    return Path(base) / "tokens"


def _digest(task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> str:
    python_side = [type(tokenizer).__name__, tokenizer.truncation_side, tokenizer.split_special_tokens]
    given = [FORMAT, max_length, task.is_dual, *python_side]
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


def _check_room(task: Task, tokenizer: Any, max_length: int) -> None:
    """Raise a ConfigError where no token of a text would be left; the tokenizer then would not truncate at all."""
    if not tokenizer.is_fast:
        raise ModelError("model.server_model: its tokenizer has no tokenizer.json; save it with a fast tokenizer")
    num_texts = 2 if task.is_pair and not task.is_dual else 1
    least = tokenizer.num_special_tokens_to_add(pair=num_texts == 2) + num_texts
    if max_length < least:
        raise ConfigError(f"model.max_length: {max_length} leaves {task.name} no room for text; write {least} or more")


def mend_surrogates(texts: list[str]) -> list[str]:
    """Halves of characters, which JSON can hold and UTF-8 cannot: pairs joined, single ones become U+FFFD."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts]
    return texts


def _encode(tokenizer: Any, columns: list[list[str]], max_length: int) -> tuple[TokenPart, np.ndarray]:
    """The tokens, and which examples were truncated."""
    # A call leaves its padding and truncation in the tokenizer, and the caller's own is saved with the model.
    tokenizer = copy.deepcopy(tokenizer)
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    lengths: list[int] = []
    truncated: list[bool] = []
    for start in range(0, len(columns[0]), BLOCK):
        block = [column[start : start + BLOCK] for column in columns]
        # A tokenizer.json may carry fixed padding and truncation: both are always said here.
        encoded = tokenizer(*block, padding=False, truncation=True, max_length=max_length, return_token_type_ids=True)
        ids.extend(np.asarray(row, dtype=np.int32) for row in encoded["input_ids"])
        segments.extend(np.asarray(row, dtype=np.uint8) for row in encoded["token_type_ids"])
        lengths.extend(len(row) for row in encoded["input_ids"])
        truncated.extend(bool(encoding.overflowing) for encoding in encoded.encodings)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    empty = [np.zeros(0, dtype=np.int32)]
    part = TokenPart(np.concatenate(ids or empty), np.concatenate(segments or empty).astype(np.uint8), offsets)
    return part, np.asarray(truncated, dtype=bool)


def _read_meta(folder: Path) -> dict[str, int] | None:
    """What `_write` noted; None where it did not finish."""
    try:
        meta: dict[str, int] = json.loads((folder / "meta.json").read_text())
        return meta
    except (OSError, ValueError):
        return None


def _write(folder: Path, encoded: list[tuple[TokenPart, np.ndarray]]) -> dict[str, int]:
    """Write all or nothing; return the folder's meta."""
    truncated = np.logical_or.reduce([cut for _, cut in encoded])
    meta = {"parts": len(encoded), "truncated": int(truncated.sum())}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokens-", dir=folder.parent) as temporary:
            whole = Path(temporary) / folder.name
            whole.mkdir()
            for number, (part, _) in enumerate(encoded):
                for name in ARRAYS:
                    np.save(whole / f"{number}.{name}.npy", getattr(part, name))
            (whole / "meta.json").write_text(json.dumps(meta))
            _put(whole, folder)
    except OSError as error:
        # Another process may have finished the same folder first.
        if _read_meta(folder) is None:
            raise FedmtlError(
                f"data.cache: cannot write tokens to {folder.parent} ({error.strerror or error}); "
                "make room there, or name another folder"
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
