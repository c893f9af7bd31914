"""Is it the head, the optimizer or the encoder that makes accuracy collapse when more clients share the same examples?

    python benchmarks/collapse.py run --data DATA --models MODELS --device cuda --out benchmarks/results/collapse.json
    python benchmarks/collapse.py show benchmarks/results/collapse.json --figure docs/results/collapse.svg

Hilmkil et al. ("Scaling Federated Learning for Fine-tuning of Large Language Models", NLDB 2021) saw DistilBERT fall to
chance with more clients, and BERT and ALBERT not, all with plain SGD at 2e-5. DATA has sst2/train.tsv.gz and
sst2/dev.tsv.gz; MODELS has minilm-l6 and minilm-l3. There are no pretrained weights of the paper's encoders in them, so
that these have the paper's classes with MiniLM's values:

* bert: minilm-l6 as it is, a BertModel of six layers with a pooler.
* distilbert: minilm-l3 as a DistilBertModel, half as many layers, without token types and pooler; the embedding of the
  first type is added to every position, so that it computes what minilm-l3 does.
* albert: an AlbertModel whose one layer, used six times, is the mean of minilm-l6's; embeddings and pooler are its own.
* bert-random: the shape of bert with random values.

At a rate of 2e-5 steps are so small that where SGD gets to depends on the rate times the number of steps. The paper's
one client makes 156,400 steps on imdb and 750,000 on ag_news; ours makes some thousand, at a rate that makes the
product the same (`sgd-imdb`, `sgd-ag_news`). K clients make 1/K of the steps in as many rounds, there and here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

BATCH, EPOCHS = 32, 2
# The rate times the steps of the paper's one client: 100 rounds of two epochs over all examples, at 2e-5.
PAPER = {
    name: 2e-5 * 100 * EPOCHS * math.ceil(examples / BATCH)
    for name, examples in {"sgd-imdb": 25_000, "sgd-ag_news": 120_000}.items()
}
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd-imdb": {**PLAIN, "max_grad_norm": 0.0},
    "sgd-ag_news": {**PLAIN, "max_grad_norm": 0.0},
    "sgd-2e-5": {**PLAIN, "max_grad_norm": 0.0, "learning_rate": 2e-5},
    "sgd-good": {**PLAIN, "max_grad_norm": 1.0, "learning_rate": 0.05},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-4},
}
# Dropout of 0.1 in front of every output layer.
HEADS: dict[str, dict[str, Any]] = {
    "mean": {"pool": "mean", "dropout": 0.1},
    "first": {"pool": "cls", "dropout": 0.1},
    "dense": {"pool": "cls", "dropout": 0.0, "head": {"activation": "relu", "dropout": 0.1}},
    "pooler": {"pool": "pooler", "dropout": 0.1},
}
WORDS = {
    "mean": "linear on the mean",
    "first": "linear on the first token",
    "dense": "dense + ReLU on the first token",
    "pooler": "linear on the pretrained pooler",
}
# What is run: of an optimizer, the heads of each encoder.
GRID: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd-imdb": {
        "bert": ("pooler", "dense", "first", "mean"),
        "distilbert": ("dense", "first", "mean"),
        "albert": ("pooler", "dense", "first"),
        "bert-random": ("dense", "first"),
    },
    "sgd-ag_news": {
        "bert": ("pooler", "dense", "first"),
        "distilbert": ("dense", "first"),
        "albert": ("pooler", "dense"),
    },
    "sgd-good": {"bert": ("dense", "first"), "distilbert": ("dense", "first"), "albert": ("dense",)},
    "adamw": {"bert": ("dense", "first"), "distilbert": ("dense", "first"), "albert": ("dense",)},
    "sgd-2e-5": {"bert": ("dense",)},
}
# Only what is laid out as BERT trains several clients at once; so many, that sixteen runs fit on one GPU.
STACKED, STACK = ("bert", "bert-random"), 8
# Accuracy so near to that of one answer for all is chance.
MARGIN = 0.05


@dataclass(frozen=True)
class Cell:
    encoder: str
    head: str
    optimizer: str
    clients: int
    seed: int

    @property
    def row(self) -> tuple[str, str, str]:
        return self.optimizer, self.encoder, self.head


def cells(options: argparse.Namespace) -> list[Cell]:
    """All cells, first those that say most if time is short: seed by seed the fewest and the most clients."""
    counts = sorted(options.clients)
    ends, between = dict.fromkeys((counts[0], counts[-1])), counts[1:-1]
    order = [(clients, seed) for part in (ends, between) for seed in options.seeds for clients in part]
    rows = [
        (optimizer, encoder, head)
        for optimizer, by_encoder in GRID.items()
        for encoder, heads in by_encoder.items()
        for head in heads
        if not options.only or any(word in f"{optimizer} {encoder} {head}" for word in options.only.split(","))
    ]
    return [
        Cell(encoder, head, optimizer, clients, seed) for clients, seed in order for optimizer, encoder, head in rows
    ]


def build_encoders(models: Path, folder: Path) -> None:
    """Write the encoders of this benchmark as folders that `model.server_model` can name."""
    import torch
    from safetensors.torch import load_file
    from transformers import (
        AlbertConfig,
        AlbertModel,
        AutoTokenizer,
        BertConfig,
        BertModel,
        DistilBertConfig,
        DistilBertModel,
    )

    def opened(name: str) -> tuple[Any, dict[str, Any]]:
        config = BertConfig.from_pretrained(models / name, local_files_only=True)
        return config, {key: value.float() for key, value in load_file(models / name / "model.safetensors").items()}

    def saved(name: str, module: Any, values: Mapping[str, Any]) -> None:
        module.load_state_dict(dict(values), strict=True)
        module.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(models / "minilm-l6", local_files_only=True).save_pretrained(folder / name)

    config, six = opened("minilm-l6")
    saved("bert", BertModel(config), six)
    shape = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}

    config, three = opened("minilm-l3")
    sizes = {"dim": config.hidden_size, "hidden_dim": config.intermediate_size, "n_layers": config.num_hidden_layers}
    distilbert = DistilBertModel(DistilBertConfig(**shape, **sizes, n_heads=config.num_attention_heads, pad_token_id=0))
    values = {
        key: three[key]
        for key in ("embeddings.word_embeddings.weight", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias")
    }
    types = three["embeddings.token_type_embeddings.weight"]
    values["embeddings.position_embeddings.weight"] = three["embeddings.position_embeddings.weight"] + types[0]
    for number in range(config.num_hidden_layers):
        for theirs, ours in DISTILBERT.items():
            for leaf in ("weight", "bias"):
                values[f"transformer.layer.{number}.{theirs}.{leaf}"] = three[f"encoder.layer.{number}.{ours}.{leaf}"]
    saved("distilbert", distilbert, values)

    config, _ = opened("minilm-l6")
    width = config.hidden_size
    albert = AlbertModel(
        AlbertConfig(
            **shape, embedding_size=width, hidden_size=width, num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads, intermediate_size=config.intermediate_size,
            hidden_act="gelu", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, pad_token_id=0,
        )
    )  # fmt: skip
    values = {key: value for key, value in six.items() if key.startswith("embeddings.")}
    values |= {"pooler.weight": six["pooler.dense.weight"], "pooler.bias": six["pooler.dense.bias"]}
    values["encoder.embedding_hidden_mapping_in.weight"] = torch.eye(width)
    values["encoder.embedding_hidden_mapping_in.bias"] = torch.zeros(width)
    for theirs, ours in ALBERT.items():
        for leaf in ("weight", "bias"):
            every = [six[f"encoder.layer.{number}.{ours}.{leaf}"] for number in range(config.num_hidden_layers)]
            values[f"encoder.albert_layer_groups.0.albert_layers.0.{theirs}.{leaf}"] = torch.stack(every).mean(0)
    saved("albert", albert, values)


DISTILBERT = {
    "attention.q_lin": "attention.self.query", "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value", "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm", "ffn.lin1": "intermediate.dense", "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}  # fmt: skip
ALBERT = {
    "attention.query": "attention.self.query", "attention.key": "attention.self.key",
    "attention.value": "attention.self.value", "attention.dense": "attention.output.dense",
    "attention.LayerNorm": "attention.output.LayerNorm", "ffn": "intermediate.dense", "ffn_output": "output.dense",
    "full_layer_layer_norm": "output.LayerNorm",
}  # fmt: skip


def training_of(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """The section `training` of a cell; where the optimizer has no rate, one client gets the paper's rate x steps."""
    steps = options.rounds * EPOCHS * math.ceil(options.examples / BATCH)
    return {
        "learning_rate": PAPER.get(cell.optimizer, 0.0) / steps,
        **OPTIMIZERS[cell.optimizer],
        "num_rounds": options.rounds,
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "schedule": "constant",
    }


def score(cell: Cell, options: argparse.Namespace, encoders: Path, deadline: float) -> dict[str, Any] | None:
    """Return the accuracies of one federation, or its error; None where there is no time left to begin."""
    if time.time() > deadline:
        return None
    try:
        return train(cell, options, encoders)
    except Exception as error:  # one run that diverges costs itself
        return {**asdict(cell), "error": f"{type(error).__name__}: {error}"[:300]}


def train(cell: Cell, options: argparse.Namespace, encoders: Path) -> dict[str, Any]:
    """Train one federation and return its accuracies."""
    began = time.time()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import fedmtl

    torch.set_num_threads(1)
    is_stacked = options.device != "cpu" and cell.encoder in STACKED
    training = training_of(cell, options)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        config = {
            "defaults": "plain",
            "seed": cell.seed,
            "model": {
                "server_model": str(encoders / cell.encoder.removesuffix("-random")),
                "initial": "random" if cell.encoder.endswith("-random") else "pretrained",
                "max_length": 128,
            },
            "data": {"root": str(options.data), "source": "files", "cache": str(encoders / "tokens")},
            "tasks": {
                "sst2": {"train_samples": options.examples, "val_samples": options.validation, **HEADS[cell.head]}
            },
            "federation": {"clients_per_task": cell.clients},
            "training": training,
            "evaluation": {"every": options.every, "batch_size": 512},
            "compute": {
                "workers": 0,
                "device": options.device,
                "precision": "fp32",
                "stack": STACK if is_stacked else 0,
            },
            "output": folder,
        }
        curve, confusion = {}, [[0]]
        for event in fedmtl.run(config).events():
            if event.kind == "evaluation":
                curve[event.round] = round(event.metrics["accuracy"], 4)
                confusion = event.confusion
    counts = [sum(row) for row in confusion]
    return {
        **asdict(cell),
        "learning_rate": training["learning_rate"],
        "steps": options.rounds * EPOCHS * math.ceil(options.examples / cell.clients / BATCH),
        "chance": round(max(counts) / sum(counts), 4),
        "curve": curve,
        "accuracy": curve[options.rounds],
        "seconds": round(time.time() - began, 1),
    }


def work(
    waiting: queue.SimpleQueue[Cell],
    found: list[dict[str, Any]],
    options: argparse.Namespace,
    encoders: Path,
    deadline: float,
) -> None:
    """Run cells in one process until none is left; a process that dies costs its cell, and is replaced."""
    while not waiting.empty():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process, suppress(queue.Empty):
            while True:
                cell = waiting.get_nowait()
                try:
                    result = process.submit(score, cell, options, encoders, deadline).result()
                except BrokenProcessPool:
                    found.append({**asdict(cell), "error": "its process died"})
                    break
                if result is not None:
                    found.append(result)
                    print(json.dumps({**result, "curve": None}), flush=True)


def run(options: argparse.Namespace) -> None:
    options.data, options.models = options.data.resolve(), options.models.resolve()
    began, wanted, found = time.time(), cells(options), []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("examples", "validation", "rounds", "device", "jobs")}
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in wanted:
        waiting.put(cell)
    with tempfile.TemporaryDirectory(dir=options.scratch) as built, ThreadPoolExecutor(options.jobs) as threads:
        build_encoders(options.models, Path(built))
        deadline = began + 60 * options.minutes
        lines = [threads.submit(work, waiting, found, options, Path(built), deadline) for _ in range(options.jobs)]
        while not all(line.done() for line in lines):
            time.sleep(1)
            record = {"settings": settings, "seconds": round(time.time() - began, 1), "cells": list(found)}
            options.out.write_text(json.dumps(record, indent=1) + "\n")
        for line in lines:
            line.result()
    print(f"{len(found)} of {len(wanted)} cells in {time.time() - began:.0f} s")


Row = dict[int, list[float]]


def by_row(found: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Row]:
    """Optimizer, encoder and head -> number of clients -> accuracies, in the order of the grid and of the seeds."""
    rows: dict[tuple[str, str, str], Row] = {
        (optimizer, encoder, head): {}
        for optimizer, by_encoder in GRID.items()
        for encoder, heads in by_encoder.items()
        for head in heads
    }
    for one in sorted(found, key=lambda one: (one["clients"], one["seed"])):
        if "accuracy" in one:
            row = rows.setdefault((one["optimizer"], one["encoder"], one["head"]), {})
            row.setdefault(one["clients"], []).append(one["accuracy"])
    return {key: row for key, row in rows.items() if row}


def show(options: argparse.Namespace) -> None:
    """Print the table, and write the figure."""
    found = json.loads(options.results.read_text())["cells"]
    rows = by_row(found)
    counts = sorted({clients for row in rows.values() for clients in row})
    chance = statistics.mean(one["chance"] for one in found if "chance" in one)
    print(f"chance {chance:.3f}; bold is within {MARGIN:g} of it in every seed\n")
    print("| optimizer | encoder | head |", " | ".join(f"{n} client{'s' * (n > 1)}" for n in counts), "|")
    print("|---|---|---|" + "---|" * len(counts))
    for (optimizer, encoder, head), row in rows.items():
        shown = " | ".join(_shown(row.get(clients, []), chance) for clients in counts)
        print(f"| {optimizer} | {encoder} | {WORDS[head]} | {shown} |")
    show_left(found)
    failed = [one for one in found if "error" in one]
    for one in failed[:5]:
        print("failed:", json.dumps(one))
    if options.figure is not None:
        options.figure.write_text(figure(rows, found, chance))


def left_at(one: Mapping[str, Any]) -> float | None:
    """The rate times the steps a client had made when accuracy was first better than chance; None where never."""
    for number, value in sorted(one["curve"].items(), key=lambda point: int(point[0])):
        if int(number) and value > one["chance"] + MARGIN:
            return travelled(one, int(number))
    return None


def travelled(one: Mapping[str, Any], number: int) -> float:
    """The learning rate times the steps that a client has made after so many rounds."""
    steps: int = one["steps"]
    rate: float = one["learning_rate"]
    return rate * steps * number / max(int(last) for last in one["curve"])


def show_left(found: Sequence[Mapping[str, Any]]) -> None:
    """Print when each row of the paper's rate x steps left chance, seed by seed."""
    print("\n| optimizer | encoder | head | clients | rate x steps when better than chance, by seed | in all |")
    print("|---|---|---|---|---|---|")
    known = [one for one in found if one["optimizer"] in PAPER and "curve" in one]
    for key in [(*row, clients) for row, by_clients in by_row(known).items() for clients in by_clients]:
        own = [one for one in known if (one["optimizer"], one["encoder"], one["head"], one["clients"]) == key]
        at = [left_at(one) for one in sorted(own, key=lambda one: one["seed"])]
        words = ", ".join("never" if value is None else f"{value:.2f}" for value in at)
        last = travelled(own[0], max(int(number) for number in own[0]["curve"]))
        print(f"| {key[0]} | {key[1]} | {WORDS[key[2]]} | {key[3]} | {words} | {last:.2f} |")


def _shown(values: Sequence[float], chance: float) -> str:
    if not values:
        return ""
    middle = f"{statistics.mean(values):.3f}".lstrip("0")
    seeds = " ".join(f"{value:.2f}".lstrip("0") for value in values)
    is_chance = all(value <= chance + MARGIN for value in values)
    return f"**{middle}** ({seeds})" if is_chance else f"{middle} ({seeds})"


COLOURS = {"pooler": "#1b7f3b", "first": "#1f5fbf", "mean": "#8a5bc7", "dense": "#c8371b"}
DASHES = {"bert": "", "distilbert": "6 3", "albert": "2 3", "bert-random": ""}
WIDE, HIGH, GAP, LEFT, COLUMNS = 210, 170, 46, 44, 4
LOW, TOP = 0.45, 0.95


def figure(rows: Mapping[tuple[str, str, str], Row], found: Sequence[Mapping[str, Any]], chance: float) -> str:
    """Panels of accuracy over the rate times the steps of a client, by encoder; and over clients."""
    panels = [_travelled(found, encoder, chance) for encoder in GRID["sgd-imdb"]]
    wanted = [("sgd-imdb", encoder) for encoder in GRID["sgd-imdb"]]
    for optimizer, encoder in [*wanted, *((optimizer, "") for optimizer in ("sgd-ag_news", "sgd-good", "adamw"))]:
        own = {key[1:]: row for key, row in rows.items() if key[0] == optimizer and encoder in ("", key[1])}
        if any(len(row) > 1 for row in own.values()):
            panels.append(_panel(f"{optimizer}, {encoder or 'all encoders'}", own, chance))
    drawn = [line for number, panel in enumerate(panels) for line in _located(number, panel)]
    width, height = LEFT + COLUMNS * (WIDE + GAP), 40 + -(-len(panels) // COLUMNS) * (HIGH + GAP + 20) + 20
    drawn += _legend(height - 12)
    box = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    opening = f'<svg {box} font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([opening, *drawn, "</svg>\n"])


def _located(number: int, drawn: Iterator[str]) -> list[str]:
    left, top = LEFT + number % COLUMNS * (WIDE + GAP), 40 + number // COLUMNS * (HIGH + GAP + 20)
    return [f'<g transform="translate({left},{top})">', *drawn, "</g>"]


def _height(value: float) -> float:
    return round((TOP - value) / (TOP - LOW) * HIGH, 1)


def _axes(title: str, chance: float, ticks: Mapping[str, float], name: str) -> Iterator[str]:
    yield f'<text x="0" y="-8" font-weight="600">{title}</text>'
    for value in (0.5, 0.6, 0.7, 0.8, 0.9):
        y = _height(value)
        yield f'<path d="M0,{y}h{WIDE}" stroke="#ddd"/><text x="-6" y="{y + 4}" text-anchor="end">{value}</text>'
    yield f'<path d="M0,{_height(chance)}h{WIDE}" stroke="#888" stroke-dasharray="3 3"/>'
    for words, at in ticks.items():
        yield f'<text x="{at:.1f}" y="{HIGH + 14}" text-anchor="middle">{words}</text>'
    yield f'<text x="{WIDE / 2}" y="{HIGH + 28}" text-anchor="middle" fill="#555">{name}</text>'


def _panel(title: str, own: Mapping[tuple[str, str], Row], chance: float) -> Iterator[str]:
    counts = sorted({clients for row in own.values() for clients in row}) or [1]
    across = {clients: math.log2(clients) / (math.log2(counts[-1]) or 1.0) * WIDE for clients in counts}
    yield from _axes(title, chance, {str(clients): at for clients, at in across.items()}, "clients")
    for (encoder, head), row in own.items():
        points = " ".join(f"{across[clients]:.1f},{_height(statistics.mean(row[clients]))}" for clients in row)
        look = f'stroke="{COLOURS[head]}" fill="none" stroke-width="1.8" stroke-dasharray="{DASHES[encoder]}"'
        yield f'<polyline points="{points}" {look}><title>{encoder}, {WORDS[head]}</title></polyline>'
        dots = [(across[clients], value) for clients, values in row.items() for value in values]
        yield from (_dot(x, value, head) for x, value in dots)


def _travelled(found: Sequence[Mapping[str, Any]], encoder: str, chance: float) -> Iterator[str]:
    """Accuracy on the way, a line for each head and number of clients; and where the paper's K clients end on imdb."""
    low, high = math.log10(0.015), math.log10(16)

    def across(travel: float) -> float:
        return (math.log10(travel) - low) / (high - low) * WIDE

    ticks = {f"{travel:g}": across(travel) for travel in (0.03, 0.1, 0.3, 1, 3, 10)}
    yield from _axes(f"plain SGD, {encoder}", chance, ticks, "rate x steps of a client")
    for clients in (1, 4, 32):
        x = round(across(PAPER["sgd-imdb"] / clients), 1)
        yield f'<path d="M{x},0v{HIGH}" stroke="#bbb"/><text x="{x + 2}" y="9" fill="#777">{clients}</text>'
    own = [one for one in found if one["optimizer"] in PAPER and one["encoder"] == encoder and "curve" in one]
    for optimizer, head, clients in dict.fromkeys((one["optimizer"], one["head"], one["clients"]) for one in own):
        points: dict[float, list[float]] = {}
        for one in own:
            if (one["optimizer"], one["head"], one["clients"]) == (optimizer, head, clients):
                for number, value in one["curve"].items():
                    if int(number):
                        points.setdefault(round(travelled(one, int(number)), 6), []).append(value)
        line = " ".join(f"{across(x):.1f},{_height(statistics.mean(points[x]))}" for x in sorted(points))
        dashes = "" if clients == 1 else "4 3"
        yield (
            f'<polyline points="{line}" stroke="{COLOURS[head]}" fill="none" stroke-width="1.5" '
            f'stroke-dasharray="{dashes}"><title>{WORDS[head]}, {optimizer}, {clients} clients</title></polyline>'
        )
        yield from (_dot(across(x), value, head) for x, values in points.items() for value in values)


def _dot(x: float, value: float, head: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{_height(value)}" r="2" fill="{COLOURS[head]}" fill-opacity="0.5"/>'


def _legend(y: float) -> Iterator[str]:
    looks = {words: (COLOURS[head], "") for head, words in WORDS.items()}
    looks |= {encoder: ("#333", DASHES[encoder]) for encoder in ("distilbert", "albert")}
    x = LEFT
    for words, (colour, dashes) in looks.items():
        yield f'<path d="M{x},{y - 4}h22" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        yield f'<text x="{x + 28}" y="{y}">{words}</text>'
        x += 46 + 6 * len(words)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    given = commands.add_parser("run", help="train every cell and write the scores")
    given.add_argument("--data", type=Path, required=True, help="folder with sst2")
    given.add_argument("--models", type=Path, required=True, help="folder with minilm-l6 and minilm-l3")
    given.add_argument("--out", type=Path, required=True, help="file for the scores, as JSON")
    given.add_argument("--device", default="cpu")
    given.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at once; on a GPU start NVIDIA MPS first"
    )
    given.add_argument("--minutes", type=float, default=8.0, help="after these no run is begun")
    given.add_argument("--clients", type=numbers, default=[1, 4, 16, 32])
    given.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    given.add_argument("--examples", type=int, default=1024, help="training examples that are divided")
    given.add_argument("--validation", type=int, default=872, help="rows of dev that score")
    given.add_argument("--rounds", type=int, default=6)
    given.add_argument("--every", type=int, default=1, help="rounds between two scores")
    given.add_argument("--only", default="", help="rows with one of these words, with commas between")
    given.add_argument("--scratch", type=Path, help="folder for what is only needed meanwhile, such as /dev/shm")
    shown = commands.add_parser("show", help="print the table and draw the figure")
    shown.add_argument("results", type=Path)
    shown.add_argument("--figure", type=Path, help="file for the figure, as SVG")
    options = parser.parse_args()
    run(options) if options.command == "run" else show(options)


if __name__ == "__main__":
    main()
