"""The loop that tagging is compared with trains on first pieces of words, in batches of the width it says."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
speed = pytest.importorskip("tagging_speed")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(files("fedmtl.model") / "tiny"))


@pytest.fixture(scope="module")
def sentences(tokenizer):
    rows = [
        {"tokens": ["aspirin", "helps"], "tags": ["B-Chemical", "O"]},
        {"tokens": ["acetylsalicylic", "acid"], "tags": ["B-Chemical", "I-Chemical"]},
    ]
    return speed.tokenized([json.dumps(row) for row in rows], tokenizer)


def test_only_the_first_piece_of_a_word_has_its_label(sentences, tokenizer):
    for tokens, labels, expected in zip(sentences.tokens, sentences.labels, ([1, 0], [1, 2]), strict=True):
        pieces = tokenizer.convert_ids_to_tokens(tokens)
        assert [label for label in labels if label != speed.IGNORED] == expected
        is_ignored = [label == speed.IGNORED for label in labels]
        assert is_ignored == [piece.startswith(("##", "[")) for piece in pieces]


def test_batches_are_as_wide_as_they_say(sentences, tokenizer):
    ((padded, mask, labels),) = speed.batches(sentences, False, tokenizer.pad_token_id, 0)
    assert padded.shape == mask.shape == labels.shape == (2, 128)
    ((longest, mask, labels),) = speed.batches(sentences, True, tokenizer.pad_token_id, 0)
    assert longest.shape[1] == max(map(len, sentences.tokens))
    assert mask.sum(1).sort().values.tolist() == sorted(map(len, sentences.tokens))
    assert torch.all(labels[~mask] == speed.IGNORED)
