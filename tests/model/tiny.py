"""Encoders of seven kinds, two layers deep and 32 wide, with tokenizers that fit them."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from fedmtl.config import ModelConfig
from fedmtl.model.encoder import Encoder, load_encoder
from fedmtl.model.multitask import Inputs, MultiTaskModel, build_model, wants_pooler
from fedmtl.tasks.task import Task

KINDS = ("bert", "albert", "distilbert", "roberta", "electra", "modernbert", "mpnet")
WITH_POOLER = ("bert", "albert", "roberta", "mpnet")
WORDS = (
    "a", "the", "film", "plot", "is", "was", "dull", "fine", "long", "great", "not", "good", "bad", "and", "very",
    "question", "same", "other", "how", "what",
)  # fmt: skip
LENGTH = 24
WIDTH = 32


def write_encoder(kind: str, folder: Path, pooler: bool = True) -> Path:
    """Save an encoder with random weights and a tokenizer; without `pooler`, its files lack one."""
    tokenizer = make_tokenizer(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        options = {} if pooler or kind not in WITH_POOLER else {"add_pooling_layer": False}
        module = AutoModel.from_config(make_config(kind, tokenizer), **options)
        # Fresh norms and biases are all 1 and 0, which would hide a parameter that went to the wrong place.
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TWO_LABELS = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}


def write_classifier(kind: str, folder: Path, **labels: Any) -> Any:
    """Save a classifier whose every value differs from a fresh one's, and return it."""
    tokenizer = make_tokenizer(kind)
    config = make_config(kind, tokenizer)
    for name, value in (labels or TWO_LABELS).items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        model = AutoModelForSequenceClassification.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def make_config(kind: str, tokenizer: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind in ("albert", "electra"):
        sizes["embedding_size"] = 16
    if kind == "roberta":
        sizes["type_vocab_size"] = 1
    if kind == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    if kind == "modernbert":
        sizes |= {"local_attention": 8, "global_attn_every_n_layers": 2}
        sizes |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep")}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(kind, **sizes)


def make_tokenizer(kind: str) -> Any:
    """Words and letters; RoBERTa and MPNet pad with id 1, ModernBERT with one of the last ids, others with 0."""
    letters = string.ascii_lowercase
    words = [*letters, *(f"##{letter}" for letter in letters), *WORDS]
    if kind in ("roberta", "mpnet"):
        cls, pad, sep, unk = "<s>", "<pad>", "</s>", "<unk>"
        vocabulary = [cls, pad, sep, unk, *words]
    else:
        cls, pad, sep, unk = "[CLS]", "[PAD]", "[SEP]", "[UNK]"
        vocabulary = [*words, unk, cls, sep, pad] if kind == "modernbert" else [pad, unk, cls, sep, *words]
    pieces = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=unk))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = ((sep, pieces[sep]), (cls, pieces[cls]))
    tokenizer.post_processor = (
        processors.RobertaProcessing(*ends) if kind in ("roberta", "mpnet") else processors.BertProcessing(*ends)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, pad_token=pad, cls_token=cls, sep_token=sep
    )


def load(folder: Path | str, tasks: Sequence[Task], seed: int = 0, **keys: Any) -> tuple[Encoder, MultiTaskModel]:
    by_name = {task.name: task for task in tasks}
    config = ModelConfig(server_model=str(folder), **{"max_length": LENGTH, **keys})
    encoder = load_encoder(config, seed, wants_pooler(by_name))
    return encoder, build_model(encoder, by_name, seed, config)


def encode(tokenizer: Any, task: Task, rows: Sequence[tuple[str, ...]]) -> Inputs:
    columns = [list(column) for column in zip(*rows, strict=True)]
    texts = [columns[0] + columns[1]] if task.is_dual else columns
    encoded = tokenizer(
        *texts, padding="longest", truncation=True, max_length=LENGTH, return_token_type_ids=True, return_tensors="pt"
    )
    return Inputs(encoded["input_ids"], encoded["attention_mask"], encoded["token_type_ids"])


def make_task(name: str = "single", **keys: Any) -> Task:
    """Two labels, one text and no dropout, unless told otherwise."""
    kind = keys.pop("kind", "classification")
    defaults = {"text": ("text",), "label": "label", "metric": "accuracy", "dropout": 0.0}
    labels = {"labels": ("no", "yes")} if kind == "classification" else {"metric": "pearson"}
    return Task(name=name, kind=kind, **{**defaults, **labels, **keys})


SINGLES = [("the plot is dull",), ("a great film and very long",), ("good",), ("what was it",)]
PAIRS = [
    ("the plot is dull", "the film is not good"),
    ("a great film", "how very long and bad"),
    ("good", "same"),
    ("what was the plot", "what is the same question"),
]
