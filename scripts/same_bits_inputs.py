"""What the configs of same_bits.yaml read: encoders of four families, tables and texts, the same at every call."""

from __future__ import annotations

import csv
import gzip
import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = (
    "a", "the", "film", "plot", "is", "was", "dull", "fine", "long", "great", "not", "good", "bad", "and", "very",
    "question", "same", "other", "how", "what", "letter", "parcel", "late", "lost", "bill", "paid", "twice", "price",
    "station", "train", "cat", "dog", "garden", "river", "music", "loud", "quiet",
)  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Encoders of four families, and tables and texts for tasks that are not in the package."""
    draw = random.Random(18)

    def text(topic: int = 0) -> str:
        return " ".join(draw.choice(WORDS[10 * topic : 10 * topic + 20]) for _ in range(draw.randint(4, 12)))

    def topics(count: int, regions: Sequence[str]) -> list[list[str]]:
        numbers = [number % 3 for number in range(count)]
        names = ("film", "parcel", "garden")
        return [[text(number), names[number], draw.choice(regions)] for number in numbers]

    def matches(count: int) -> list[list[str]]:
        pairs = [(text(), number % 2 == 0) for number in range(count)]
        return [[first, first if is_same else text(), "yes" if is_same else "no"] for first, is_same in pairs]

    header = ["message", "topic", "region"]
    write_table(folder / "topics.tsv", header, topics(72, ("east", "west", "north", "south")))
    for region in ("north", "south"):
        write_table(folder / f"{region}.tsv", header[:2], [row[:2] for row in topics(36, (region,))])
    pair = ["first", "second"]
    rows = [dict(zip([*pair, "match"], row, strict=True)) for row in matches(48)]
    (folder / "matches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_table(folder / "matches.csv", [*pair, "match"], matches(20))
    scores = [[text(), text(), f"{draw.uniform(0, 4):.1f}"] for _ in range(48)]
    write_table(folder / "scores.csv", [*pair, "score"], scores)
    (folder / "texts.txt").write_text("".join(f"{text()}\n" for _ in range(30)), encoding="utf-8")
    write_table(folder / "pairs.tsv", pair, [[text(), text()] for _ in range(30)])
    for split, count in (("train", 40), ("dev", 16)):
        labels = ("negative", "positive")
        single = [[text(), labels[number % 2]] for number in range(count)]
        write_table(folder / f"root/sst2/{split}.tsv.gz", ["sentence", "label"], single)
        scored = [[text(), text(), f"{draw.uniform(0, 5):.1f}"] for _ in range(count)]
        write_table(folder / f"root/stsb/{split}.tsv.gz", ["sentence1", "sentence2", "label"], scored)
    for kind in ("bert", "albert", "distilbert", "modernbert"):
        write_encoder(kind, folder / kind)


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    delimiter = "," if path.suffix == ".csv" else "\t"
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([header, *rows])


def write_encoder(kind: str, folder: Path) -> None:
    """Two layers, 32 wide, random weights, and a tokenizer of words and letters."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    letters = string.ascii_lowercase
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *WORDS]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(*((word, vocabulary[word]) for word in ("[SEP]", "[CLS]")))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 64, "pad_token_id": 0,
        "hidden_dim" if kind == "distilbert" else "intermediate_size": 64,
    }  # fmt: skip
    if kind == "albert":
        sizes["embedding_size"] = 16
    if kind == "modernbert":
        sizes |= {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(18)
    module = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():
        # Fresh biases are all 0 and fresh norms all 1, which would hide values that went to the wrong parameter.
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    module.save_pretrained(folder)
