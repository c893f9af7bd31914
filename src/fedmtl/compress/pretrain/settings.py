"""The settings of a pretraining; every default of `fedmtl pretrain` stands here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedmtl.errors import ConfigError
from fedmtl.training.layer_maps import LayerMap

# Enough for the special tokens, a basic alphabet at the start of words and inside them, and some words.
FEWEST_PIECES = 200
TEACHER = "teacher"


@dataclass(frozen=True)
class Losses:
    """The weight of each term; 0 leaves it out, and nothing of it is computed.

    `own_similarity` compares the student's sentences as they are, `similarity` after the last projection.
    """

    hidden: float = 1.0
    similarity: float = 10.0
    own_similarity: float = 30.0
    attention: float = 0.0

    def weight(self, term: str) -> float:
        """The weight of a term of the total; embeddings are the first of the hidden states."""
        return float(getattr(self, "hidden" if term == "embedding" else term))


@dataclass(frozen=True)
class PretrainSettings:
    """One pretraining; the same settings, texts and teacher give the same bits on one CPU thread with `steps`.

    `vocab` is the number of word pieces of a new vocabulary, or TEACHER for the teacher's.
    """

    teacher: Path
    corpus: tuple[str, ...]
    layers: int = 2
    hidden: int = 128
    heads: int | None = None
    vocab: int | str = 15_000
    max_length: int = 128
    chunk_words: int = 96
    steps: int | None = None
    minutes: float | None = None
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.02
    max_grad_norm: float = 1.0
    seed: int = 0
    layer_map: LayerMap = "uniform"
    losses: Losses = field(default_factory=Losses)
    mask_words: float = 0.0
    altered: bool = True
    balanced: bool = True
    teacher_table: bool = True
    pairs: bool = False

    @property
    def same_tokens(self) -> bool:
        """Whether the student reads the teacher's tokens."""
        return self.vocab == TEACHER

    @property
    def num_drawn(self) -> int:
        """Segments of a batch that come from the corpus; the others are altered copies of them."""
        return self.batch // 2 if self.altered else self.batch

    @property
    def num_heads(self) -> int:
        """As given, or one for every 64 of the width."""
        return self.heads or max(1, self.hidden // 64)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        layer_map = self.layer_map
        values["layer_map"] = layer_map if isinstance(layer_map, str) else list(layer_map)
        return {**values, "teacher": str(self.teacher), "corpus": list(self.corpus), "heads": self.num_heads}

    def fingerprint(self, segments: str) -> str:
        """Equal where a checkpoint of one may go on under the other."""
        values = {**self.to_json(), "teacher": self.teacher.name, "corpus": segments}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def check_settings(settings: PretrainSettings) -> None:
    """Raise a ConfigError for what cannot be, before anything is read."""
    for name in ("layers", "hidden", "batch", "learning_rate", "chunk_words"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"{_option(name)}: found {getattr(settings, name):g}; write a number above 0")
    if (settings.steps is None) == (settings.minutes is None):
        raise ConfigError("--steps, --minutes: give one of them, it says when to end")
    if (settings.steps or settings.minutes or 0) <= 0:
        raise ConfigError("--steps, --minutes: there is nothing to do; write a number above 0")
    if settings.batch < 2:
        raise ConfigError("--batch: found 1; sentences of a batch are compared, write 2 or more")
    if settings.altered and (settings.batch % 2 or settings.batch < 4):
        raise ConfigError(
            f"--batch: found {settings.batch}; half of it are altered copies of the other half, write an even number "
            "from 4 on, or --no-altered"
        )
    if settings.hidden % settings.num_heads:
        raise ConfigError(
            f"--heads: {settings.num_heads} do not divide --hidden {settings.hidden}; write one that does"
        )
    _check_vocab(settings.vocab)
    if settings.pairs and (not settings.same_tokens or settings.altered or settings.mask_words):
        raise ConfigError(
            f"--pairs: found --vocab {settings.vocab}, altered copies {_switch(settings.altered)} and --mask-words"
            f" {settings.mask_words:g}; two texts are read in one pass with --vocab {TEACHER}, --no-altered and no"
            " --mask-words"
        )
    if settings.max_length < 4:
        raise ConfigError(f"--max-length: {settings.max_length} leaves no tokens for text; write 4 or more")
    if not 0 <= settings.mask_words < 1:
        raise ConfigError(f"--mask-words: found {settings.mask_words:g}; write a share from 0 to below 1")
    weights = [getattr(settings.losses, item.name) for item in fields(settings.losses)]
    if any(weight < 0 for weight in weights):
        raise ConfigError("a loss has a weight below 0; write 0 to leave it out")
    if not any(weights):
        raise ConfigError("every loss is switched off; leave one on")


def parse_vocab(text: str) -> int | str:
    """A number of word pieces, or `teacher`."""
    vocab = int(text) if text.isdecimal() else text
    _check_vocab(vocab)
    return vocab


def _check_vocab(vocab: int | str) -> None:
    if vocab != TEACHER and (isinstance(vocab, str) or vocab < FEWEST_PIECES):
        raise ConfigError(
            f"--vocab: found {vocab}; write a number of word pieces from {FEWEST_PIECES} on, or {TEACHER}"
        )


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
