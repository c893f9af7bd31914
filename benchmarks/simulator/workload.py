"""The one workload, made by seed: an encoder of bert-tiny's shape, three tasks, one a client in rotation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 30_522
TASKS = ("singles", "pairs", "scores")
SAMPLES = 300
BATCH = 32
MAX_LENGTH = 128
VALIDATION = 2_000
SEED = 0


@dataclass(frozen=True)
class Length:
    """Words per text: log-normal about a median, between two words and the most."""

    median: float
    spread: float
    most: int


LENGTHS = {"singles": Length(16, 0.6, 62), "pairs": Length(13, 0.4, 60), "scores": Length(13, 0.4, 60)}


@dataclass(frozen=True)
class Examples:
    """Examples of one task as columns: one text column or two, and a label that is a class or a score of 0 to 5."""

    task: str
    texts: list[list[str]]
    labels: list[str]

    def part(self, start: int, stop: int) -> Examples:
        return Examples(self.task, [column[start:stop] for column in self.texts], self.labels[start:stop])


class Texts:
    """Draws examples from a fixed vocabulary with word frequencies as in natural text (Zipf)."""

    def __init__(self, pieces: list[str]) -> None:
        self._words = np.array([piece for piece in pieces[165:] if not piece.startswith("##")])
        weights = 1 / np.arange(10, len(self._words) + 10) ** 1.05
        self._cumulative = np.cumsum(weights / weights.sum())

    def draw(self, task: str, count: int, seed: int, most: int | None = None) -> Examples:
        """`most` bounds the words of a text, for large populations of short ones."""
        rng = np.random.default_rng([SEED, seed, TASKS.index(task)])
        columns = [self._column(LENGTHS[task], count, most, rng) for _ in range(1 if task == "singles" else 2)]
        if task == "scores":
            labels = [f"{score:.3f}" for score in rng.random(count) * 5]
        else:
            labels = [str(label) for label in rng.integers(0, 2, count)]
        return Examples(task, columns, labels)

    def _column(self, distribution: Length, count: int, most: int | None, rng: np.random.Generator) -> list[str]:
        drawn = np.rint(distribution.median * np.exp(distribution.spread * rng.standard_normal(count)))
        sizes = np.clip(drawn, 2, min(distribution.most, most or distribution.most)).astype(np.int64)
        indices = np.searchsorted(self._cumulative, rng.random(int(sizes.sum())))
        words = self._words[np.minimum(indices, len(self._words) - 1)]
        return [" ".join(part) for part in np.split(words, np.cumsum(sizes)[:-1])]


def pieces() -> list[str]:
    """The vocabulary: special pieces, letters, and random words and word ends."""
    rng = random.Random(SEED)
    found = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    found += [*letters, *".,!?'", *("##" + letter for letter in letters)]
    known = set(found)
    while len(found) < VOCABULARY:
        word = "".join(rng.choice("etaoinshrdlucm") for _ in range(rng.randint(2, 8)))
        if rng.random() < 0.2:
            word = "##" + word[:4]
        if word not in known:
            known.add(word)
            found.append(word)
    return found


def make_workload(folder: Path, populations: Iterable[int]) -> None:
    """Write the encoder and the validation files, and each population's task files, config and tokens; once."""
    encoder, texts = folder / "encoder", Texts(pieces())
    if not (encoder / "config.json").exists():
        _write_encoder(encoder)
        scored = {task: texts.draw(task, VALIDATION, seed=1) for task in TASKS}
        for task, examples in scored.items():
            write_table(folder / f"{task}-validation.tsv", examples)
        _write_tokens(folder / "validation.npz", scored.values(), encoder)
    for clients in populations:
        population = folder / f"clients-{clients}"
        if not (population / "config.yaml").exists():
            population.mkdir(parents=True, exist_ok=True)
            drawn = {task: texts.draw(task, SAMPLES * len(owners(clients, task)), seed=2) for task in TASKS}
            for task, examples in drawn.items():
                write_table(population / f"{task}.tsv", examples)
            _write_tokens(population / "tokens.npz", _dealt(drawn, clients), encoder)
            names = {f"c{i:02}": {"tasks": [TASKS[i % len(TASKS)]]} for i in range(clients)}
            write_config(population / "config.yaml", folder, {task: f"{task}.tsv" for task in TASKS}, clients=names)


def owners(clients: int, task: str) -> list[int]:
    """The clients of a task: tasks are dealt to clients in rotation."""
    return [client for client in range(clients) if client % len(TASKS) == TASKS.index(task)]


def _dealt(drawn: dict[str, Examples], clients: int) -> Iterator[Examples]:
    for client in range(clients):
        start = client // len(TASKS) * SAMPLES
        yield drawn[TASKS[client % len(TASKS)]].part(start, start + SAMPLES)


def write_config(
    path: Path, folder: Path, files: dict[str, str], train_samples: int | None = None, **sections: Any
) -> None:
    """A config of fedmtl; JSON is YAML too."""
    tasks: dict[str, Any] = {}
    for task in TASKS:
        text = ["text"] if task == "singles" else ["first", "second"]
        kind = {"kind": "regression", "score_range": [0, 5]} if task == "scores" else {"kind": "classification"}
        source = {"train": files[task], "validation": str(folder / f"{task}-validation.tsv")}
        tasks[task] = {**kind, "source": source, "text": text, "label": "label", "val_samples": 8}
        tasks[task] |= {} if train_samples is None else {"train_samples": train_samples}
    config = {
        "defaults": "plain",
        "model": {"server_model": str(folder / "encoder"), "max_length": MAX_LENGTH},
        "data": {"cache": str(folder / "cache")},
        "tasks": tasks,
        "training": {"local_epochs": 1, "batch_size": BATCH},
        # The first and the last round are evaluated in any case; neither is counted.
        "evaluation": {"every": 1_000_000, "baselines": "none"},
        "compute": {"device": "cpu"},
        **sections,
    }
    path.write_text(json.dumps(config, indent=1))


def write_table(path: Path, examples: Examples) -> None:
    names = ["text"] if len(examples.texts) == 1 else ["first", "second"]
    with path.open("w") as file:
        file.write("\t".join([*names, "label"]) + "\n")
        file.writelines("\t".join(row) + "\n" for row in zip(*examples.texts, examples.labels, strict=True))


def _write_encoder(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    from fedmtl.model.wordpiece import wrap_tokenizer

    torch.manual_seed(SEED)
    shape = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    folder.mkdir(parents=True, exist_ok=True)
    wrap_tokenizer({piece: index for index, piece in enumerate(pieces())}).save_pretrained(folder)
    BertModel(shape).save_pretrained(folder)


def _write_tokens(path: Path, parts: Iterable[Examples], encoder: Path) -> None:
    """Examples as tokens, part by part, for the contestants: tokenizing is not what is timed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    ids: list[list[int]] = []
    segments: list[list[int]] = []
    labels: list[float] = []
    for part in parts:
        encoded = tokenizer(*part.texts, truncation=True, max_length=MAX_LENGTH, return_token_type_ids=True)
        ids += encoded["input_ids"]
        segments += encoded["token_type_ids"]
        labels += [float(label) / (5 if part.task == "scores" else 1) for label in part.labels]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    np.savez(
        path,
        ids=np.concatenate([np.asarray(row, np.int32) for row in ids]),
        segments=np.concatenate([np.asarray(row, np.uint8) for row in segments]),
        offsets=offsets.astype(np.int64),
        labels=np.asarray(labels, np.float32),
    )
