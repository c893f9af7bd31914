"""Candidates for a word from an encoder that predicts masked words, in the word's own text.

As in TinyBERT (Jiao et al. 2020, algorithm 1) only words of a single piece are masked and predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from fedmtl.compress.augment.words import Word
from fedmtl.errors import ModelError
from fedmtl.model.encoder_files import NO_CODE, NO_PICKLE, check_encoder_files, encoder_folder

BATCH = 128
MAX_LENGTH = 128
# More than are asked for: pieces of words and signs among them are left out.
SPARE = 3

Place = tuple[int, Word]


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
        except Exception as error:  # every library a loader calls has its own kinds
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
        self, texts: Sequence[str], places: Sequence[Place], count: int, advance: Callable[[int, int], None]
    ) -> dict[Place, tuple[str, ...]]:
        """The `count` likeliest whole words for each place; places of several pieces, or cut off, are left out."""
        found: dict[Place, tuple[str, ...]] = {}
        masked = [item for item in (self._masked(texts[number], (number, word)) for number, word in places) if item]
        # Alike in length, so that little is padded.
        masked.sort(key=lambda item: len(item[1]))
        for start in range(0, len(masked), BATCH):
            block = masked[start : start + BATCH]
            for (place, _, _), pieces in zip(block, self._likeliest(block, count), strict=True):
                found[place] = self._words(pieces, place[1], count)
            advance(min(len(masked), start + BATCH), len(masked))
        return found

    def _masked(self, text: str, place: Place) -> tuple[Place, list[int], int] | None:
        encoded = self._tokenizer(text, truncation=True, max_length=MAX_LENGTH, padding=False)
        word = place[1]
        first, last = encoded.char_to_token(word.start), encoded.char_to_token(word.end - 1)
        if first is None or first != last:
            return None
        ids = list(encoded["input_ids"])
        ids[first] = self._tokenizer.mask_token_id
        return place, ids, first

    @torch.inference_mode()
    def _likeliest(self, block: Sequence[tuple[Place, list[int], int]], count: int) -> list[list[int]]:
        width = max(len(ids) for _, ids, _ in block)
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([own + [padding] * (width - len(own)) for _, own, _ in block], device=self._device)
        lengths = torch.tensor([len(own) for _, own, _ in block], device=self._device)
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
