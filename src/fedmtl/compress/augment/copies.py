"""Copies of examples with some words replaced: TinyBERT's data augmentation (Jiao et al. 2020, algorithm 1).

Every word is replaced with probability p by one of its M candidates, N times an example. Of a pair one text is
changed at a time, the two alternating, and the other stays as it is; TinyBERT's code goes on with the changed first
text when it comes to the second. Copies that came out before are left out, so with p = 0 there are none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.compress.augment.candidates import (
    MaskedWords,
    Occurrence,
    Word,
    file_digest,
    find_words,
    glove_neighbours,
    replace_words,
    wordnet_synonyms,
)
from fedmtl.compress.augment.settings import AugmentSettings
from fedmtl.errors import ConfigError
from fedmtl.model.encoder_files import encoder_folder
from fedmtl.runs.folder import write_atomic
from fedmtl.seeds import derive_seed
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.sequences import Sequences

Say = Callable[[str], None]
TABLES = {"glove": glove_neighbours, "wordnet": wordnet_synonyms}
FORMAT = 1


def augment(
    settings: AugmentSettings,
    examples: Mapping[str, Examples],
    encoder: str,
    cache: Path,
    seed: int,
    device: torch.device,
    say: Say,
) -> dict[str, Examples]:
    """Every task's examples followed by their copies, which have the labels of what they are copies of.

    What was made before of the same texts, files and settings is read from `cache`.
    """
    of_words = next((name for name, part in examples.items() if isinstance(part.labels, Sequences)), None)
    if of_words is not None:
        raise ConfigError(
            f"--augment: found with {of_words}, whose labels are those of single words, and a copy has other words;"
            " leave it out"
        )
    budgets = shares(
        {name: settings.copies_of(name) * len(originals) for name, originals in examples.items()}, settings.most
    )
    sources = [_named(source, encoder) for source in settings.sources]
    found: dict[str, Examples] = {}
    for name, originals in examples.items():
        wanted = _copies_each(len(originals), budgets[name], derive_seed(seed, "augment", name, "which"))
        path = cache / f"{_digest(settings, originals, sources, wanted, seed, name)}.json"
        copies = _read(path, len(originals), len(originals.texts)) if path.exists() else None
        if copies is None:
            say(f"{name}: augmenting {len(originals):,} examples, at most {int(wanted.sum()):,} copies")
            copies = _make(settings, originals, sources, wanted, derive_seed(seed, "augment", name), device, say, name)
            write_atomic(path, json.dumps(copies, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        say(f"{name}: {len(copies['rows']):,} copies of {len(originals):,} examples")
        rows = np.asarray(copies["rows"], dtype=np.int64)
        found[name] = Examples(
            tuple([*column, *added] for column, added in zip(originals.texts, copies["texts"], strict=True)),
            np.concatenate([originals.labels, originals.labels[rows]]),
        )
    return found


def _read(path: Path, num_examples: int, num_texts: int) -> dict[str, Any] | None:
    """The copies in a file of the cache; None where it is broken, so that they are made again."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
        rows, texts = content["rows"], content["texts"]
        is_whole = all(type(row) is int and 0 <= row < num_examples for row in rows) and len(texts) == num_texts
        is_whole &= all(len(column) == len(rows) and all(type(text) is str for text in column) for column in texts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if is_whole else None


def shares(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """Divide `most` copies over the tasks: one that wants less than an equal share gets all, the others get alike."""
    left, given = most, dict.fromkeys(wanted, 0)
    waiting = sorted(wanted, key=lambda name: wanted[name])
    while waiting:
        name = waiting.pop(0)
        given[name] = min(wanted[name], left // (len(waiting) + 1))
        left -= given[name]
    return given


def make_copies(
    texts: tuple[str, ...],
    candidates: Sequence[Sequence[tuple[Word, tuple[str, ...]]]],
    count: int,
    p: float,
    seed: int,
) -> list[tuple[str, ...]]:
    """At most `count` different copies of one example, none the example itself; one text is changed in each."""
    generator = np.random.Generator(np.random.PCG64(seed))
    sides = [side for side, choices in enumerate(candidates) if choices]
    seen = {texts}
    copies: list[tuple[str, ...]] = []
    for number in range(count if sides else 0):
        side = sides[number % len(sides)]
        choices = candidates[side]
        replaced = generator.random(len(choices)) < p
        chosen = generator.integers([len(others) for _, others in choices])
        words = [
            others[pick] if is_new else None
            for (_, others), pick, is_new in zip(choices, chosen, replaced, strict=True)
        ]
        changed = replace_words(texts[side], [word for word, _ in choices], words)
        copy = (*texts[:side], changed, *texts[side + 1 :])
        if copy not in seen:
            seen.add(copy)
            copies.append(copy)
    return copies


def _make(
    settings: AugmentSettings,
    given: Examples,
    sources: Sequence[tuple[str, str]],
    wanted: np.ndarray,
    seed: int,
    device: torch.device,
    say: Say,
    name: str,
) -> dict[str, list[object]]:
    columns = [_column_candidates(settings, texts, sources, device, say, name) for texts in given.texts]
    rows: list[object] = []
    texts: list[list[str]] = [[] for _ in given.texts]
    for row, (count, example) in enumerate(zip(wanted.tolist(), zip(*given.texts, strict=True), strict=True)):
        by_column = [column[row] for column in columns]
        for copy in make_copies(example, by_column, count, settings.probability, derive_seed(seed, row)):
            rows.append(row)
            for column, text in zip(texts, copy, strict=True):
                column.append(text)
    return {"rows": rows, "texts": list(texts)}


def _column_candidates(
    settings: AugmentSettings,
    texts: Sequence[str],
    sources: Sequence[tuple[str, str]],
    device: torch.device,
    say: Say,
    name: str,
) -> list[list[tuple[Word, tuple[str, ...]]]]:
    """For every text its words that have candidates; the first source that has some for a word gives them."""
    words = [find_words(text) for text in texts]
    missing: dict[Occurrence, None] = {(row, word): None for row, in_text in enumerate(words) for word in in_text}
    found: dict[Occurrence, tuple[str, ...]] = {}
    for kind, source in sources:
        if kind == "mlm":
            say(f"{name}: predicting {len(missing):,} masked words")
            new = MaskedWords(source, device).candidates(texts, list(missing), settings.candidates, _tenths(say, name))
        else:
            table = TABLES[kind](Path(source), (word.lower for _, word in missing), settings.candidates)
            new = {at: table[at[1].lower] for at in missing if at[1].lower in table}
        found |= {at: others for at, others in new.items() if others}
        missing = {at: None for at in missing if at not in found}
    return [[(word, found[row, word]) for word in in_text if (row, word) in found] for row, in_text in enumerate(words)]


def _tenths(say: Say, name: str) -> Callable[[int, int], None]:
    """Return a callback that reports every tenth of the masked words."""
    reported = [0]

    def advance(done: int, total: int) -> None:
        if 10 * done // total > reported[0]:
            reported[0] = 10 * done // total
            say(f"{name}: {done:,} of {total:,} masked words predicted")

    return advance


def _copies_each(num_examples: int, budget: int, seed: int) -> np.ndarray:
    """The budget spread evenly; what does not divide goes to some drawn by the seed."""
    counts = np.full(num_examples, budget // max(1, num_examples), dtype=np.int64)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_examples)
    counts[order[: budget % max(1, num_examples)]] += 1
    return counts


def _named(source: str, encoder: str) -> tuple[str, str]:
    kind, _, name = source.partition(":")
    return kind, name or encoder


def _digest(
    settings: AugmentSettings,
    given: Examples,
    sources: Sequence[tuple[str, str]],
    wanted: np.ndarray,
    seed: int,
    name: str,
) -> str:
    """Name the copies by the content of the texts and files they are made of, never by the paths."""
    options = [FORMAT, settings.probability, settings.candidates, seed, name, [kind for kind, _ in sources]]
    digest = hashlib.sha256(json.dumps(options).encode())
    digest.update(wanted.astype("<i8").tobytes())
    for texts in given.texts:
        digest.update(json.dumps(texts).encode())
    for kind, path in sources:
        folder = encoder_folder(path)
        files = sorted(folder.glob("*.safetensors")) if kind == "mlm" else [Path(path)]
        digest.update("".join(map(file_digest, files)).encode() or path.encode())
    return digest.hexdigest()[:32]
