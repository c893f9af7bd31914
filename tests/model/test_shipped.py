"""The encoder in the box."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from fedmtl.config import ModelConfig
from fedmtl.model import encoder as encoders
from fedmtl.model.encoder import load_encoder
from fedmtl.tasks.embedded import embedded_columns

TINY = encoders.SHIPPED["tiny"]


@pytest.fixture(scope="module")
def tiny():
    return AutoModel.from_pretrained(TINY, dtype=torch.float32, add_pooling_layer=False).eval()


def embed(model, texts):
    inputs = AutoTokenizer.from_pretrained(TINY)(texts, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)
    with torch.inference_mode():
        return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def test_it_is_small(tiny):
    files = list(TINY.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) <= 6e6
    # With room for heads of three dual tasks, 2 x 513 weights each.
    assert sum(parameter.numel() for parameter in tiny.parameters()) <= 2_500_000 - 3 * 2 * 514


def test_its_name_loads_what_transformers_loads(tiny):
    loaded = load_encoder(ModelConfig(server_model="tiny"), seed=0)
    assert not loaded.has_pooler
    mine = dict(loaded.module.named_parameters())
    assert all(torch.equal(value, mine[name]) for name, value in tiny.named_parameters())
    assert (
        loaded.tokenizer("a good film")["input_ids"] == AutoTokenizer.from_pretrained(TINY)("a good film")["input_ids"]
    )


def test_a_folder_of_that_name_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert load_encoder(ModelConfig(server_model="tiny"), seed=0).hidden_size == 128


def test_it_knows_what_is_alike(tiny):
    texts = ["a man is playing a guitar", "someone plays an instrument", "the stock market fell sharply on tuesday"]
    vectors = torch.nn.functional.normalize(embed(tiny, texts), dim=-1)
    cosines = vectors @ vectors.T
    assert cosines[0, 1] > 0.4
    assert cosines[0, 1] > cosines[0, 2] + 0.3


def test_it_scores_the_embedded_similarity_without_training(tiny):
    columns = embedded_columns("similarity", "validation")
    first, second = (embed(tiny, columns[name][:300]) for name in ("sentence1", "sentence2"))
    scores = torch.tensor([float(label) for label in columns["label"][:300]])
    cosines = torch.cosine_similarity(first, second)
    assert torch.corrcoef(torch.stack([cosines, scores]))[0, 1] > 0.25


def test_the_card_says_where_it_comes_from():
    card = (Path(TINY) / "README.md").read_text()
    for said in ("minilm-l6", "Apache-2.0", "Quora duplicates", "fedmtl pretrain", "Seed 0", "sst2/train.tsv.gz"):
        assert said in card
    assert "dev.tsv" not in card
