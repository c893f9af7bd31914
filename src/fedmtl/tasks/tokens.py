"""Texts tokenized once and kept on disk; opened as memory maps, so that a worker holds only what it reads."""

from __future__ import annotations

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

from fedmtl.tasks.task import Task

FORMAT = 1
BLOCK = 4096


@dataclass(frozen=True)
class TokenPart:
    """One token sequence per example, end to end in one array."""

    ids: np.ndarray
    segments: np.ndarray
    offsets: np.ndarray

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Tokens:
    """The tokens of all examples of one text set: one part, or two where each text of a pair stands alone."""

    parts: tuple[TokenPart, ...]

    def lengths(self) -> np.ndarray:
        """The longest sequence of each example."""
        lengths = [part.lengths() for part in self.parts]
        return lengths[0] if len(lengths) == 1 else np.maximum(*lengths)


def tokenize(
    task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int, cache: Path
) -> tuple[Path, int]:
    """Tokenize unless the cache has it; the folder, and how many examples were truncated."""
    folder = cache / _digest(task, texts, tokenizer, max_length)
    if not (folder / "meta.json").exists():
        columns = [[text] for text in texts] if task.is_dual else [list(texts)]
        _write(folder, [_encode(tokenizer, column, max_length) for column in columns])
    return folder, int(json.loads((folder / "meta.json").read_text())["truncated"])


@lru_cache(maxsize=64)
def open_tokens(folder: Path) -> Tokens:
    """The tokens in a folder that `tokenize` made, as memory maps."""
    num_parts = json.loads((folder / "meta.json").read_text())["parts"]
    return Tokens(
        tuple(
            TokenPart(
                *(np.load(folder / f"{part}.{name}.npy", mmap_mode="r") for name in ("ids", "segments", "offsets"))
            )
            for part in range(num_parts)
        )
    )


def default_cache() -> Path:
    base = os.environ.get("FEDMTL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedmtl"
    return Path(base) / "tokens"


def _digest(task: Task, texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {max_length} {task.is_dual} {type(tokenizer).__name__}".encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for column in texts:
        digest.update(f"\0{len(column)}\0".encode())
        digest.update("\0".join(column).encode())
    return digest.hexdigest()[:32]


def _encode(tokenizer: Any, columns: list[list[str]], max_length: int) -> tuple[TokenPart, np.ndarray]:
    """The tokens, and which examples were truncated."""
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


def _write(folder: Path, encoded: list[tuple[TokenPart, np.ndarray]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tokens-", dir=folder.parent))
    try:
        for number, (part, _) in enumerate(encoded):
            for name in ("ids", "segments", "offsets"):
                np.save(temporary / f"{number}.{name}.npy", getattr(part, name))
        truncated = np.logical_or.reduce([cut for _, cut in encoded])
        (temporary / "meta.json").write_text(json.dumps({"parts": len(encoded), "truncated": int(truncated.sum())}))
        temporary.rename(folder)
    except OSError:
        # Another process may have finished the same folder first; anything else is a real fault.
        if not (folder / "meta.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
