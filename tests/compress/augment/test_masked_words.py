import pytest
import torch
from transformers import AutoModelForMaskedLM

from fedmtl.compress.augment.candidates import MaskedWords, find_words
from fedmtl.errors import ModelError
from model.tiny import make_config, make_tokenizer, write_encoder

CPU = torch.device("cpu")


def write_masked(folder):
    tokenizer = make_tokenizer("bert")
    tokenizer.mask_token = "[UNK]"
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(make_config("bert", tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_whole_words_for_words_of_one_piece(tmp_path):
    source = MaskedWords(str(write_masked(tmp_path)), CPU)
    texts = ["a dull film", "great plot, zebra"]
    places = [(row, word) for row, text in enumerate(texts) for word in find_words(text)]
    found = source.candidates(texts, places, 4, lambda done, total: None)
    # `zebra` is spelled out in letters.
    assert {word.text for _, word in found} == {"dull", "film", "great", "plot"}
    for (_, word), others in found.items():
        assert len(others) == 4
        assert word.text not in others
        assert not any(other.startswith(("##", "[")) for other in others)


def test_an_encoder_without_the_head_is_refused(tmp_path):
    with pytest.raises(ModelError, match="predicts no masked words"):
        MaskedWords(str(write_encoder("bert", tmp_path)), CPU)
