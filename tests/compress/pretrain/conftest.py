"""A teacher of three layers, 32 wide, with whole words for pieces, and three hundred embedded sentences."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from compress.listening import Listener
from fedmtl.compress.pretrain.run import Disclosure, Machine, PretrainPaths, pretrain
from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.tasks.embedded import embedded_columns


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    tokenizer = basic_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = BertModel(config)
        # Fresh weights barely mix positions; larger ones make layers and sentences differ.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentences(tmp_path_factory) -> Path:
    texts = embedded_columns("sentiment", "train")["sentence"][:300]
    path = tmp_path_factory.mktemp("texts") / "sentences.txt"
    path.write_text("\n".join(texts))
    return path


@pytest.fixture
def run(teacher, sentences, tmp_path):
    """Pretrain a student of two layers, 16 wide; the student and the listener."""

    def start(out="small", *, resume=False, machine=None, disclosure=None, **given):
        values = {"corpus": (str(sentences),), "layers": 2, "hidden": 16, "heads": 2, "vocab": 260, "max_length": 32}
        values |= {"batch": 32, "steps": 6, "learning_rate": 1e-2, "teacher": teacher}
        listener = Listener()
        student = pretrain(
            PretrainSettings(**{**values, **given}),
            PretrainPaths(tmp_path / out, tmp_path / "work", tmp_path / f"{out}.json"),
            machine or Machine("cpu"),
            disclosure or Disclosure("fedmtl pretrain ..."),
            listener,
            resume=resume,
        )
        return student, listener

    return start
