"""configs/biomedical.yaml against a plain transformers loop over the same clients, in sentences per second.

    python benchmarks/tagging_speed.py --data FOLDER [--encoder tiny] [--device cpu] [--threads 2] [--turns 3]
                                       [--rounds 4] [--set KEY=VALUE ...] [--out FILE]

FOLDER is that of benchmarks/tagging.py. The loop is what a script would do: one client after the other, a copy of
`AutoModelForTokenClassification` each, the same sentences in batches of one size, AdamW, one pass, then the mean of
the copies; fp32, and on a GPU also bf16 by autocast. Its tokens are made before the clock starts. It pads to 128
tokens (`padded`), or to the longest sentence of each batch (`longest`, what transformers' own example does with its
collator). The rate of a run is that of its rounds after the first, everything in them included. All take turns in one
call; the figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from fedmtl.runs.events import RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from tagging import ROOT, TASKS, read

SITES, BATCH, LONGEST = 3, 32, 128
TAGS = {"O": 0, "B": 1, "I": 2}
IGNORED = -100


@dataclass(frozen=True)
class Sentences:
    """The tokens of a client's sentences, and the label of each word's first piece."""

    tokens: list[list[int]]
    labels: list[list[int]]


def tokenized(lines: Sequence[str], tokenizer: Any) -> Sentences:
    rows = [json.loads(line) for line in lines]
    encoded = tokenizer([row["tokens"] for row in rows], is_split_into_words=True, truncation=True, max_length=LONGEST)
    labels = []
    for number, row in enumerate(rows):
        words = encoded.word_ids(number)
        is_first = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
        labels.append(
            [TAGS[row["tags"][word][0]] if first else IGNORED for word, first in zip(words, is_first, strict=True)]
        )
    return Sentences(encoded["input_ids"], labels)


def batches(sentences: Sentences, longest: bool, padding: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Shuffled batches, each padded to 128 tokens or to the longest of its sentences."""
    order = np.random.default_rng(seed).permutation(len(sentences.tokens))
    found = []
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        width = max(len(sentences.tokens[row]) for row in chosen) if longest else LONGEST
        tokens = torch.full((len(chosen), width), padding)
        labels = torch.full((len(chosen), width), IGNORED)
        for at, row in enumerate(chosen):
            length = len(sentences.tokens[row])
            tokens[at, :length] = torch.tensor(sentences.tokens[row])
            labels[at, :length] = torch.tensor(sentences.labels[row])
        found.append((tokens, tokens != padding, labels))
    return found


def loop(clients: list[Sentences], folder: Path, padding: int, options: argparse.Namespace, form: str) -> float:
    """Sentences per second of one round over all clients, one after the other."""
    device = torch.device(options.device)
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=len(TAGS)).to(device).train()
    longest, autocast = form.startswith("longest"), form.endswith("bf16")
    rounds = [batches(client, longest, padding, seed) for seed, client in enumerate(clients)]
    started = time.perf_counter()
    total: dict[str, torch.Tensor] = {}
    for steps in rounds:
        one = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        for tokens, mask, labels in steps:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
                loss = one(input_ids=tokens.to(device), attention_mask=mask.to(device), labels=labels.to(device)).loss
            loss.backward()
            optimizer.step()
        for name, value in one.state_dict().items():
            total[name] = total.get(name, 0) + value / len(clients)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return sum(len(client.tokens) for client in clients) / (time.perf_counter() - started)


def run(options: argparse.Namespace, out: Path) -> float:
    """Sentences per second of `fedmtl run`, the median of its rounds after the first."""
    shutil.rmtree(out / "speed", ignore_errors=True)
    settings = {
        "output": out, "data.root": options.data, "data.cache": out / "cache", "model.server_model": options.encoder,
        "training.num_rounds": options.rounds, "training.batch_size": BATCH, "tasks.bc2gm.batch_size": BATCH,
        "training.local_steps": "null", "training.keep_optimizer": "false", "compute.device": options.device,
        "compute.workers": options.threads if options.device == "cpu" else 0, "evaluation.every": options.rounds,
        "evaluation.baselines": "none",
    }  # fmt: skip
    command = [sys.executable, "-m", "fedmtl", "run", str(ROOT / "configs" / "biomedical.yaml"), "--name", "speed"]
    for option in [*(f"{key}={value}" for key, value in settings.items()), *options.settings]:
        command += ["--set", option]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stderr or done.stdout)[-2000:])
    rounds = [event for event in read_events(RunFolder(out / "speed")) if isinstance(event, RoundEvent) and event.round]
    return statistics.median(event.samples / event.seconds for event in rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", default="tiny", help="tiny, or a folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2, help="of the loop, and workers of a run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of a run, at least two")
    parser.add_argument("--share", type=float, default=1.0, help="of every client's sentences in the loop")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tagging-speed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.data = options.data.resolve()
    folder = Path(str(files("fedmtl.model") / "tiny")) if options.encoder == "tiny" else Path(options.encoder)
    torch.set_num_threads(options.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    clients = []
    for task in TASKS:
        lines = read(options.data / task / "train.jsonl.gz")
        for site in range(SITES):
            of_site = lines[site::SITES]
            clients.append(tokenized(of_site[: max(BATCH, int(len(of_site) * options.share))], tokenizer))
    forms = ["padded", "longest", *(["longest bf16"] if options.device == "cuda" else [])]
    rates: dict[str, list[float]] = {"fedmtl": [], **{form: [] for form in forms}}
    for _ in range(options.turns):
        rates["fedmtl"].append(run(options, options.work))
        for form in forms:
            rates[form].append(loop(clients, folder, tokenizer.pad_token_id, options, form))
        print({name: [round(rate) for rate in found] for name, found in rates.items()}, flush=True)
    ratios = {
        form: statistics.median(ours / other for ours, other in zip(rates["fedmtl"], rates[form], strict=True))
        for form in forms
    }
    for form, ratio in ratios.items():
        print(f"{options.encoder}: {ratio:.1f} times the loop, {form}")
    if options.out:
        described = {"encoder": folder.name, "device": options.device, "torch": torch.__version__}
        options.out.write_text(json.dumps({**described, "rates": rates, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
