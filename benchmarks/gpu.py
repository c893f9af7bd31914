"""One GPU: `fedmtl run` against a naive loop over the same clients, in samples per second.

    python benchmarks/gpu.py --work FOLDER --out gpu.json [--sizes tiny base]

Needs torch, transformers and this project. The workload is synthetic: texts of about 16 words and pairs of about 13
words each, random words with natural frequencies; three tasks, one a client. The naive loop trains one
client after the other in fp32 with eager attention, every text padded to 128, AdamW as it comes; its batches are on the
device before the clock starts. The rate of a run is that of its rounds after the second, everything in them included.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel

from fedmtl.runs.event_lines import first_of
from fedmtl.runs.events import RoundEvent, StartEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from simulator.workload import BATCH, MAX_LENGTH, TASKS, Texts, owners, pieces, write_config, write_table

# layers, width, heads, inner width, vocabulary, clients, samples of each
SIZES = {"tiny": (2, 128, 2, 512, 15_000, 32, 40_000), "base": (12, 768, 12, 3072, 30_522, 8, 2_400)}
NAIVE_SECONDS = 5.0


def make(folder: Path, size: str, samples: int, rounds: int, epochs: int) -> Path:
    """The encoder, the task files and the config; the config's path."""
    layers, width, heads, inner, vocabulary, clients, _ = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    from fedmtl.model.wordpiece import wrap_tokenizer

    torch.manual_seed(0)
    wrap_tokenizer({piece: number for number, piece in enumerate(pieces()[:vocabulary])}).save_pretrained(
        folder / "encoder"
    )
    shape = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
    )
    BertModel(shape).save_pretrained(folder / "encoder")
    texts = Texts(pieces()[:vocabulary])
    for task in TASKS:
        write_table(folder / f"{task}-validation.tsv", texts.draw(task, 64, seed=1))
        write_table(folder / f"{task}.tsv", texts.draw(task, samples * len(owners(clients, task)), seed=2))
    names = {f"c{i:02}": {"tasks": [TASKS[i % len(TASKS)]]} for i in range(clients)}
    write_config(
        folder / "config.yaml",
        folder,
        {task: f"{task}.tsv" for task in TASKS},
        clients=names,
        compute={"device": "cuda"},
        training={"local_epochs": epochs, "batch_size": BATCH, "num_rounds": rounds},
    )
    return folder / "config.yaml"


def run_fedmtl(config: Path, out: Path, options: list[str]) -> dict[str, Any]:
    """Rates of the rounds, from the run's events."""
    command = [
        sys.executable,
        "-m",
        "fedmtl",
        "run",
        str(config),
        "--name",
        "gpu",
        "--set",
        f"output={out}",
        "--profile",
    ]
    for option in options:
        command += ["--set", option]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr or done.stdout)[-2000:]}
    print("\n".join(done.stdout.splitlines()[-45:]), flush=True)
    events = read_events(RunFolder(out / "gpu"))
    start = first_of(events, StartEvent)
    rounds = [event for event in events if isinstance(event, RoundEvent) and event.round > 0]
    seconds = [event.seconds for event in rounds]
    rates = [event.samples / event.seconds for event in rounds]
    return {
        "where": {key: getattr(start, key) for key in ("device", "stack", "precision", "torch")},
        "samples": rounds[0].samples,
        "options": options,
        "seconds": seconds,
        "rate": statistics.median(rates[2:] or rates[1:]),
    }


class Naive(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = BertModel(BertConfig.from_pretrained(folder, attn_implementation="eager"))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.head(self.dropout(self.encoder(**inputs).pooler_output))


def run_naive(folder: Path) -> dict[str, float]:
    """Samples per second of a client after the other; a new copy of the model every 100 batches."""
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    rows = [
        line.rstrip("\n").split("\t")
        for line, _ in zip((folder / "pairs.tsv").open(), range(1 + 20 * BATCH), strict=False)
    ][1:]
    batches = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        encoded = tokenizer(
            [row[0] for row in part], [row[1] for row in part], padding="max_length", max_length=MAX_LENGTH,
            truncation=True, return_tensors="pt", return_token_type_ids=True,
        )  # fmt: skip
        labels = torch.from_numpy(np.asarray([int(row[2]) for row in part]))
        batches.append(({key: value.to(device) for key, value in encoded.items()}, labels.to(device)))
    base = Naive(folder / "encoder").to(device)
    count, spent = 0, 0.0
    while spent < NAIVE_SECONDS:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model = copy.deepcopy(base).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        for number in range(100):
            inputs, labels = batches[number % len(batches)]
            optimizer.zero_grad()
            F.cross_entropy(model(**inputs), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()
        spent += time.perf_counter() - started
        count += 100 * BATCH
    return {"rate": count / spent, "seconds": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--samples", type=int, help="of each client")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", dest="options", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--epochs", type=int, default=1, help="of a client's samples in a round")
    parser.add_argument("--no-naive", dest="naive", action="store_false")
    args = parser.parse_args()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for size in args.sizes:
        folder = args.work / size
        if not (folder / "config.yaml").exists():
            make(folder, size, args.samples or SIZES[size][-1], args.rounds, args.epochs)
        result: dict[str, Any] = {"naive": run_naive(folder)} if args.naive else {}
        found[size] = result
        result["fedmtl"] = run_fedmtl(folder / "config.yaml", folder / f"runs-{time.time():.0f}", args.options)
        if args.naive and "rate" in result["fedmtl"]:
            result["ratio"] = result["fedmtl"]["rate"] / result["naive"]["rate"]
        print(size, json.dumps(result), flush=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
