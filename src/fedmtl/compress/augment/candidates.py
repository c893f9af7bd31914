"""Which words of a text may be replaced, what by, and the text that results.

GloVe neighbours and WordNet synonyms do not depend on the text. An encoder that predicts masked words gives candidates
for a word within its text; as in TinyBERT (Jiao et al. 2020, algorithm 1) only words of a single piece are masked and
predicted.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from fedmtl.errors import DataError, ModelError
from fedmtl.model.encoder_files import NO_CODE, NO_PICKLE, check_encoder_files, encoder_folder

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
# Words whose neighbours in any table reverse a sentence's meaning; TinyBERT's code leaves the same kinds alone.
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
Candidates = Mapping[str, tuple[str, ...]]
# Words looked up at once: 256 x 100,000 similarities are 100 MB.
BLOCK = 256
PLAIN = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")
BATCH = 128
MAX_LENGTH = 128
# More than are requested: pieces of words and signs among them are left out.
SPARE = 3


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
    """The other word with the first one's capitals, unless it has capitals already."""
    if not other.islower():
        return other
    if word.isupper() and len(word) > 1:
        return other.upper()
    return other[0].upper() + other[1:] if word[0].isupper() else other


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
    indices = {word: index for index, word in enumerate(known)}
    usable = np.flatnonzero([PLAIN.fullmatch(word) is not None for word in known])
    offered = torch.from_numpy(vectors[usable]).T.contiguous()
    requested = [word for word in dict.fromkeys(words) if word in indices]
    found: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(requested), BLOCK):
        block = requested[start : start + BLOCK]
        likeness = torch.from_numpy(vectors[[indices[word] for word in block]]) @ offered
        # One more than requested: the nearest is the word itself.
        values, nearest = likeness.topk(min(count + 1, len(usable)))
        for word, near, chosen in zip(block, values.tolist(), usable[nearest.numpy()].tolist(), strict=True):
            # By value, then by index: `topk` leaves the order of equal values open.
            order = sorted(zip(near, chosen, strict=True), key=lambda item: (-item[0], item[1]))
            found[word] = tuple([known[index] for _, index in order if known[index] != word][:count])
    return found


def wordnet_synonyms(path: Path, words: Iterable[str], count: int) -> Candidates:
    """The first `count` synonyms of every word that the file has, in its order.

    The file has lines of lemma, part of speech and synonyms between bars, with tabs between; it may be gzipped.
    """
    requested = set(words)
    found: dict[str, dict[str, None]] = {}
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                lemma, _, rest = line.rstrip("\n").partition("\t")
                if lemma.lower() in requested and "\t" in rest:
                    others = (name.replace("_", " ") for name in rest.partition("\t")[2].split("|"))
                    synonyms = {
                        name: None for name in others if PLAIN.fullmatch(name) and name.lower() != lemma.lower()
                    }
                    found.setdefault(lemma.lower(), {}).update(synonyms)
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


Occurrence = tuple[int, Word]


class MaskedWords:
    """An encoder with a head for masked words, from a folder or the hub."""

    def __init__(self, name: str, device: torch.device) -> None:
        folder = encoder_folder(name)
        if folder.is_dir():
            check_encoder_files(folder, "--augment mlm")
        try:
            self._model, info = AutoModelForMaskedLM.from_pretrained(
                str(folder), dtype=torch.float32, output_loading_info=True, **NO_CODE, **NO_PICKLE
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **NO_CODE)
        except Exception as error:  # every library a loader calls raises other kinds
            raise ModelError(
                f"--augment mlm: {name} cannot be loaded to predict masked words; write mlm:FOLDER with one that can,"
                " or glove:FILE"
            ) from error
        lost = [key for key in info["missing_keys"] if "position_ids" not in key]
        if lost or self._tokenizer.mask_token_id is None:
            reason = f"has no weights for {lost[0]}" if lost else "has no mask token"
            raise ModelError(
                f"--augment mlm: {name} {reason}, so it predicts no masked words; write mlm:FOLDER with an encoder"
                " that does, or glove:FILE"
            )
        self._model.to(device).eval()
        self._device = device

    def candidates(
        self, texts: Sequence[str], occurrences: Sequence[Occurrence], count: int, advance: Callable[[int, int], None]
    ) -> dict[Occurrence, tuple[str, ...]]:
        """The `count` likeliest whole words for each occurrence; one of several pieces, or cut off, is left out."""
        found: dict[Occurrence, tuple[str, ...]] = {}
        masked = [
            item for item in (self._masked(texts[number], (number, word)) for number, word in occurrences) if item
        ]
        # Alike in length, so that little is padded.
        masked.sort(key=lambda item: len(item[1]))
        for start in range(0, len(masked), BATCH):
            block = masked[start : start + BATCH]
            for (occurrence, _, _), pieces in zip(block, self._likeliest(block, count), strict=True):
                found[occurrence] = self._words(pieces, occurrence[1], count)
            advance(min(len(masked), start + BATCH), len(masked))
        return found

    def _masked(self, text: str, occurrence: Occurrence) -> tuple[Occurrence, list[int], int] | None:
        encoded = self._tokenizer(text, truncation=True, max_length=MAX_LENGTH, padding=False)
        word = occurrence[1]
        first, last = encoded.char_to_token(word.start), encoded.char_to_token(word.end - 1)
        if first is None or first != last:
            return None
        ids = list(encoded["input_ids"])
        ids[first] = self._tokenizer.mask_token_id
        return occurrence, ids, first

    @torch.inference_mode()
    def _likeliest(self, block: Sequence[tuple[Occurrence, list[int], int]], count: int) -> list[list[int]]:
        width = max(len(ids) for _, ids, _ in block)
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor(
            [row_ids + [padding] * (width - len(row_ids)) for _, row_ids, _ in block], device=self._device
        )
        lengths = torch.tensor([len(row_ids) for _, row_ids, _ in block], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths[:, None]).long()
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        rows = logits[torch.arange(len(block)), torch.tensor([spot for _, _, spot in block])]
        most = min(SPARE * count + 1, rows.shape[1])
        chosen: list[list[int]] = rows.topk(most).indices.tolist()
        return chosen

    def _words(self, pieces: list[int], word: Word, count: int) -> tuple[str, ...]:
        texts = (self._tokenizer.convert_ids_to_tokens(piece) for piece in pieces)
        plain = (text.removeprefix("Ġ").removeprefix("▁") for text in texts)
        return tuple([text for text in plain if text.isalpha() and text.lower() != word.lower][:count])
