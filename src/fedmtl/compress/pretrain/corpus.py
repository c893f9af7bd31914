"""Texts out of files: one a line, or every text column of a table; long ones in chunks, none twice.

A table with two text columns may give its rows as pairs too, whose texts a student then reads in one pass.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmtl.errors import DataError
from fedmtl.seeds import derive_seed
from fedmtl.tasks.sources import SUFFIXES, is_number, read_table

LINES = (".txt", ".txt.gz")
# Whatever it holds, a column of this name is what a text was judged as.
LABEL = "label"
# Words of the shortest chunk of a long text, but for its last.
SHORTEST = 8
# A text, or two that are read in one pass.
Text = str | tuple[str, str]


@dataclass(frozen=True)
class SourceCount:
    """What one file gave: its texts, and the chunks that no file before it had."""

    file: str
    columns: tuple[str, ...]
    texts: int
    chunks: int


@dataclass(frozen=True)
class Corpus:
    texts: list[Text]
    sources: tuple[SourceCount, ...]

    def digest(self) -> str:
        """Equal for equal texts in the same order."""
        digest = hashlib.sha256()
        for text in self.texts:
            # No text has a tab: white space became single spaces.
            digest.update((text if isinstance(text, str) else "\t".join(text)).encode() + b"\n")
        return digest.hexdigest()


def read_corpus(files: Sequence[str], chunk_words: int, seed: int, *, pairs: bool = False) -> Corpus:
    """All chunks of all files, in order, each once. `FILE=N` takes N of a file's chunks, drawn by the seed.

    With `pairs`, the rows of a table with two text columns follow its texts as pairs.
    """
    seen: dict[Text, None] = {}
    sources: list[SourceCount] = []
    for name in files:
        path, limit = _parse(name)
        columns = _read(path)
        texts = [text for column in columns.values() for text in column if text.strip()]
        rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "corpus", path.name)))
        found: list[Text] = [*_chunks(texts, chunk_words, rng)]
        if pairs and len(columns) == 2:
            first, second = columns.values()
            found += _pairs(first, second, chunk_words // 2)
        fresh = [chunk for chunk in dict.fromkeys(found) if chunk not in seen]
        if limit is not None and limit < len(fresh):
            fresh = [fresh[i] for i in np.sort(rng.permutation(len(fresh))[:limit])]
        seen.update(dict.fromkeys(fresh))
        sources.append(SourceCount(str(path), tuple(columns), len(texts), len(fresh)))
    if not seen:
        raise DataError(f"--corpus: {', '.join(files) or 'no file'} holds no text; name files with texts")
    if pairs and not any(len(source.columns) == 2 for source in sources):
        raise DataError("--pairs: no file of --corpus has two columns of texts; name one, or leave it out")
    return Corpus(list(seen), tuple(sources))


def _parse(name: str) -> tuple[Path, int | None]:
    path, equals, limit = name.rpartition("=")
    if not equals or Path(name).exists():
        return Path(name), None
    if not limit.isdigit() or int(limit) < 1:
        raise DataError(f"--corpus: {name}: the number of chunks after `=` is no number above 0; mend or drop it")
    return Path(path), int(limit)


def _read(path: Path) -> dict[str, list[str]]:
    """Column -> texts; the lines of a plain file are one column without a name."""
    lower = path.name.lower()
    if lower.endswith(LINES):
        return {"": _lines(path)}
    if not lower.endswith(SUFFIXES):
        raise DataError(f"{path}: the name does not say what it holds; use {', '.join((*LINES, *SUFFIXES))}")
    table = read_table(path)
    columns = {name: values for name, values in table.columns.items() if name.lower() != LABEL and _is_text(values)}
    if not columns:
        raise DataError(
            f"{path}: has no column of texts ({', '.join(table.columns)}; `{LABEL}`, numbers and empty ones are none); "
            "name another file"
        )
    return columns


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.lower().endswith(".gz") else path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 ({error.reason}); convert it, such as with `iconv -f LATIN1 -t UTF-8`"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); copy the file again") from error
    # Not splitlines(): a text may hold U+2028, which ends no line here.
    return text.split("\n")


def _is_text(values: Iterable[str]) -> bool:
    return any(value.strip() and not is_number(value) for value in values)


def _chunks(texts: Iterable[str], chunk_words: int, rng: np.random.Generator) -> Iterable[str]:
    """Each text with single spaces; one of more than `chunk_words` in chunks of all lengths, short ones more often.

    A student that has seen only long texts, or few positions, does badly on what it has not seen.
    """
    shortest = min(SHORTEST, chunk_words)
    for text in texts:
        words = _mend(text).split()
        while len(words) > chunk_words:
            size = int(shortest * (chunk_words / shortest) ** rng.random())
            yield " ".join(words[:size])
            words = words[size:]
        if words:
            yield " ".join(words)


def _pairs(first: Iterable[str], second: Iterable[str], most_words: int) -> Iterable[tuple[str, str]]:
    """Each row where both have a text, cut to so many words, so that a first text leaves the second its tokens."""
    for texts in zip(first, second, strict=True):
        cut = [" ".join(_mend(text).split()[:most_words]) for text in texts]
        if all(cut):
            yield cut[0], cut[1]


def _mend(text: str) -> str:
    """Halves of characters, which JSON can hold and UTF-8 cannot, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
