"""Candidates for a word that do not depend on its text: GloVe neighbours and WordNet synonyms."""

from __future__ import annotations

import gzip
import hashlib
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from fedmtl.errors import DataError

Candidates = Mapping[str, tuple[str, ...]]
# Words looked up at once: 256 x 100,000 similarities are 100 MB.
BLOCK = 256
PLAIN = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")


def file_digest(path: Path) -> str:
    """Names a file by its content."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"--augment: {path} cannot be read ({error.strerror}); give the file's path") from error


def glove_neighbours(path: Path, words: Iterable[str], count: int) -> Candidates:
    """The `count` nearest words by cosine of every word that the file has.

    The file is an npz of `vectors` (a row a word) and `words`, one a line.
    """
    vectors, known = _read_glove(path)
    places = {word: place for place, word in enumerate(known)}
    usable = np.flatnonzero([PLAIN.fullmatch(word) is not None for word in known])
    offered = torch.from_numpy(vectors[usable]).T.contiguous()
    asked = [word for word in dict.fromkeys(words) if word in places]
    found: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(asked), BLOCK):
        block = asked[start : start + BLOCK]
        likeness = torch.from_numpy(vectors[[places[word] for word in block]]) @ offered
        # One more than asked for: the nearest is the word itself.
        values, nearest = likeness.topk(min(count + 1, len(usable)))
        for word, near, chosen in zip(block, values.tolist(), usable[nearest.numpy()].tolist(), strict=True):
            # By value, then by place: equal values have no order of their own.
            order = sorted(zip(near, chosen, strict=True), key=lambda item: (-item[0], item[1]))
            found[word] = tuple([known[place] for _, place in order if known[place] != word][:count])
    return found


def wordnet_synonyms(path: Path, words: Iterable[str], count: int) -> Candidates:
    """The first `count` synonyms of every word that the file has, in its order.

    The file has lines of lemma, part of speech and synonyms between bars, with tabs between; it may be gzipped.
    """
    asked = set(words)
    found: dict[str, dict[str, None]] = {}
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                lemma, _, rest = line.rstrip("\n").partition("\t")
                if lemma.lower() in asked and "\t" in rest:
                    others = (name.replace("_", " ") for name in rest.partition("\t")[2].split("|"))
                    kept = {name: None for name in others if PLAIN.fullmatch(name) and name.lower() != lemma.lower()}
                    found.setdefault(lemma.lower(), {}).update(kept)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(
            f"--augment: {path} cannot be read as synonyms ({error}); give lines of lemma, part of speech and"
            " synonyms, with tabs between"
        ) from error
    return {word: tuple(others)[:count] for word, others in found.items() if others}


def _read_glove(path: Path) -> tuple[np.ndarray, list[str]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            vectors, words = file["vectors"].astype(np.float32), file["words"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"--augment: {path} is no npz with `vectors` and `words` ({error})") from error
    text = words.tobytes().decode() if words.dtype == np.uint8 else "\n".join(map(str, words.reshape(-1)))
    known = text.removesuffix("\n").split("\n")
    if len(known) != len(vectors):
        raise DataError(f"--augment: {path} has {len(vectors):,} vectors and {len(known):,} words; both must agree")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), known
