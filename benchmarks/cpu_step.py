"""One client's round on one core: fedmtl's against a naive Hugging Face loop, in CPU seconds.

    python benchmarks/cpu_step.py [--repeats 5]

The workload is synthetic: a BERT of 2 layers, 128 wide, with 30,522 tokens; 300 samples of single texts (median 16
words) and of pairs (13 words each), batch 32, one epoch, dropout 0.1, single precision. The naive loop pads to 128,
computes every position of every layer and copies the model for each client. CPU seconds of one thread are compared,
alternating, so that other work on the machine disturbs both alike; the smallest of the repeats counts.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from fedmtl.config import TrainingConfig
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.messages import Job
from fedmtl.model.encoder import describe_encoder
from fedmtl.model.multitask import BoundModel, build_model
from fedmtl.model.wordpiece import SPECIAL, wrap_tokenizer
from fedmtl.sharing.plan import Key, SharingPlan, take_rows, used_rows
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import open_tokens, tokenize
from fedmtl.training.local import predict
from fedmtl.training.local_method import local_settings

VOCABULARY, SAMPLES, BATCH, WIDTH = 30_522, 300, 32, 128
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
CPU = torch.device("cpu")
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
TASKS = {
    "single": Task("single", "classification", ("a",), "y", "accuracy", ("no", "yes")),
    "pair": Task("pair", "classification", ("a", "b"), "y", "accuracy", ("no", "yes")),
}


class NaiveModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel(BertConfig(vocab_size=VOCABULARY, **SHAPE))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(SHAPE["hidden_size"], 2)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.head(self.dropout(self.encoder(**inputs).pooler_output))


def padded(shard: Shard, rows: np.ndarray) -> dict[str, torch.Tensor]:
    [part] = open_tokens(shard.tokens).parts
    arrays = np.zeros((3, len(rows), WIDTH), dtype=np.int64)
    for index, row in enumerate(rows):
        start, stop = part.offsets[row], part.offsets[row + 1]
        arrays[0, index, : stop - start] = part.ids[start:stop]
        arrays[1, index, : stop - start] = part.segments[start:stop]
        arrays[2, index, : stop - start] = 1
    return dict(zip(("input_ids", "token_type_ids", "attention_mask"), map(torch.from_numpy, arrays), strict=True))


def naive_round(base: NaiveModel, shard: Shard) -> None:
    model = copy.deepcopy(base).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for start in range(0, SAMPLES, BATCH):
        rows = shard.indices[start : start + BATCH]
        loss = F.cross_entropy(model(**padded(shard, rows)), torch.from_numpy(shard.labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode()
def naive_scores(base: NaiveModel, shard: Shard) -> None:
    base.eval()
    for start in range(0, SAMPLES, 64):
        base(**padded(shard, shard.indices[start : start + 64]))


def make_shard(task: Task, tokenizer: Any, words: list[str], cache: Path) -> Shard:
    rng = np.random.default_rng(len(task.text))
    chances = 1 / np.arange(10, len(words) + 10) ** 1.05
    chances /= chances.sum()

    def text(median: float, spread: float) -> str:
        num_words = int(np.clip(round(median * math.exp(spread * rng.standard_normal())), 2, 60))
        return " ".join(words[i] for i in rng.choice(len(words), num_words, p=chances))

    median, spread = (13, 0.4) if task.is_pair else (16, 0.6)
    columns = tuple([text(median, spread) for _ in range(SAMPLES)] for _ in task.text)
    folder, _ = tokenize(task, columns, tokenizer, WIDTH, cache)
    return Shard(folder, rng.integers(0, 2, SAMPLES), np.arange(SAMPLES))


def best(repeats: int, *works: Callable[[], Any]) -> list[float]:
    """The smallest CPU seconds of each; they alternate, and the first time of each does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for spent, work in zip(seconds, works, strict=True):
            started = time.process_time()
            work()
            spent.append(time.process_time() - started)
    return [min(spent[1:]) for spent in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    letters = "etaoinshrdlucm"
    rng = np.random.default_rng(0)
    words = dict.fromkeys("".join(rng.choice(list(letters), rng.integers(2, 9))) for _ in range(4 * VOCABULARY))
    pieces = [*SPECIAL, *words][:VOCABULARY]
    tokenizer = wrap_tokenizer({piece: index for index, piece in enumerate(pieces)})
    module = BertModel(BertConfig(vocab_size=VOCABULARY, **SHAPE))
    model = build_model(describe_encoder(module, tokenizer, "bench", has_pooler=True), TASKS, 0)
    weights = initial_weights(model, PLAN)
    settings = local_settings(
        TrainingConfig(), dict.fromkeys(TASKS), dict.fromkeys(TASKS, 1.0), keep_optimizer=False
    ).to_dict()
    base = NaiveModel()
    with tempfile.TemporaryDirectory() as folder:
        shards = {
            name: make_shard(task, tokenizer, pieces[len(SPECIAL) :], Path(folder)) for name, task in TASKS.items()
        }
        site = Site(model, {}, lambda _, task: shards[task], lambda _, task: shards[task], Path(folder), CPU)
        for name, shard in shards.items():
            rows = used_rows(shard.used_ids(), model.pad_id)
            keys = PLAN.keys(model.canonical(), [name], "c")[name].values()
            slice_ = {key: weights[key] for key in keys}
            slice_[Key("all", model.table)] = take_rows(slice_[Key("all", model.table)], rows)
            job = Job("train", 1, "c", (name,), slice_, PLAN, rows, 0, 0, settings)
            bound = BoundModel(model, PLAN, [name], "c", {key: weights[key] for key in keys}, read=True)

            def ours(job: Job = job) -> None:
                run_job(job, site)

            def scores(bound: BoundModel = bound, name: str = name, shard: Shard = shard) -> None:
                predict(bound, name, shard, 64, CPU)

            seconds = best(
                repeats,
                lambda shard=shard: naive_round(base, shard),
                ours,
                lambda shard=shard: naive_scores(base, shard),
                scores,
            )
            for what, slow, fast in (("training", *seconds[:2]), ("scoring", *seconds[2:])):
                print(f"{name:7s} {what:9s} naive {slow:6.3f} s  fedmtl {fast:6.3f} s  {slow / fast:5.1f}x")


if __name__ == "__main__":
    main()
