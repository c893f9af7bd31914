"""What a step with noise costs (`privacy.example`): against a plain step, and against Opacus' ghost clipping.

    python benchmarks/private_step.py --encoder tiny --encoder FOLDER [--repeats 5] [--steps 4] [--out FILE.md]

The workload is synthetic: 64 texts (median 16 words of the encoder's vocabulary), always the same batch of 64, one task
with two labels, mean pooling, AdamW, no dropout, single precision, one thread. A step is all that a client does in it:
tokens to tensors, forward, backward, clipping, noise (AES, on every value that moves), optimizer. Rows are with the
token table fixed and trained; where it is trained, a plain step moves the whole table too, as one with noise must.
Opacus (where it is installed; 1.6 was) computes transformers' BertModel with the same values and batch, padded to the
longest text, with `grad_sample_mode="ghost"`, AdamW, and position ids for every row, which it needs. CPU seconds of one
thread are compared, in turns, so that other work on the machine disturbs all alike; the smallest of the repeats counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from fedmtl.config import ModelConfig, TrainingConfig
from fedmtl.methods.example_privacy import PrivateGradients
from fedmtl.model.bert.layout import mean_pool
from fedmtl.model.multitask import BoundModel, Buffers, open_model
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import Shard, collate
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import tokenize
from fedmtl.training.local import train
from fedmtl.training.local_method import LocalMethods, Release, local_settings

BATCH, WIDTH = 64, 128
CPU = torch.device("cpu")
TASK = Task("single", "classification", ("a",), "y", "accuracy", ("no", "yes"), pool="mean", dropout=0.0)
PLANS = {
    "fixed": SharingPlan((("heads.*", "task"), ("embeddings.word*", "fixed"), ("*", "all"))),
    "trained": SharingPlan((("heads.*", "task"), ("*", "all"))),
}
OPTIONS = {
    "epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "examples_at_once": None,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """CPU seconds of one step."""

    encoder: str
    table: str
    plain: float
    private: float
    opacus: float | None


def make_shard(tokenizer: Any, cache: Path) -> Shard:
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 1)
    lengths = np.clip(np.round(16 * np.exp(0.6 * rng.standard_normal(BATCH))), 2, 60).astype(int)
    texts = [" ".join(rng.choice(words, length)) for length in lengths]
    folder, _ = tokenize(TASK, (texts,), tokenizer, WIDTH, cache)
    return Shard(folder, rng.integers(0, 2, BATCH), np.arange(BATCH))


class OpacusModel(nn.Module):
    def __init__(self, name: str, *, trains_table: bool) -> None:
        super().__init__()
        from transformers import AutoModel

        from fedmtl.model.encoder_files import encoder_folder

        self.encoder = AutoModel.from_pretrained(
            encoder_folder(name), dtype=torch.float32, add_pooling_layer=False, attn_implementation="sdpa"
        )
        for module in self.encoder.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.encoder.config.attention_probs_dropout_prob = 0.0
        self.encoder.embeddings.word_embeddings.weight.requires_grad_(trains_table)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        hidden = self.encoder(ids, mask, segments, positions).last_hidden_state
        answer: Tensor = self.head(mean_pool(hidden, mask))
        return answer


def opacus_step(name: str, shard: Shard, pad_id: int, *, trains_table: bool) -> Callable[[], None]:
    from opacus import PrivacyEngine

    arrays = collate(shard, shard.indices, pad_id, None)
    inputs = [torch.from_numpy(part) for part in (arrays.ids, arrays.mask, arrays.segments)]
    inputs.append(torch.arange(inputs[0].shape[1]).expand_as(inputs[0]).contiguous())
    labels = torch.from_numpy(arrays.labels)
    model = OpacusModel(name, trains_table=trains_table).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*inputs, labels), batch_size=BATCH)
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.AdamW(trained, lr=1e-4), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        criterion(private(*inputs), labels).backward()
        optimizer.step()

    return step


def our_step(model: Any, plan: SharingPlan, shard: Shard, folder: Path, steps: int, *, private: bool) -> Any:
    training = TrainingConfig(
        num_rounds=1, local_steps=steps, batch_size=BATCH, learning_rate=1e-4, schedule="constant"
    )
    settings = local_settings(training, {"single": None}, {"single": 1.0}, keep_optimizer=False)
    weights, buffers = initial_weights(model, plan), Buffers()

    def run() -> None:
        bound = BoundModel(model, plan, ["single"], "c", weights, None, CPU, buffers)
        release = Release(bytes(32), "a", folder / "ledger")
        methods = LocalMethods([PrivateGradients(OPTIONS)] if private else [], release=lambda: release)
        train(bound, {"single": shard}, settings, round_number=1, seed=1, device=CPU, methods=methods)

    return run


def in_turns(repeats: int, works: list[tuple[Callable[[], Any], int]]) -> list[float]:
    """The smallest CPU seconds of a step of each; the first time of each does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for spent, (work, steps) in zip(seconds, works, strict=True):
            started = time.process_time()
            work()
            spent.append((time.process_time() - started) / steps)
    return [min(spent[1:]) for spent in seconds]


def measure(name: str, table: str, repeats: int, steps: int, folder: Path) -> Row:
    config = ModelConfig(server_model=name, max_length=WIDTH, encoder_dropout=0.0)
    encoder, model = open_model(config, {"single": TASK}, 0)
    shard = make_shard(encoder.tokenizer, folder / "tokens")
    ours = {private: our_step(model, PLANS[table], shard, folder, steps, private=private) for private in (False, True)}
    works: list[tuple[Callable[[], Any], int]] = [(ours[False], steps), (ours[True], steps)]
    if find_spec("opacus") is not None:
        works.append((opacus_step(name, shard, model.pad_id, trains_table=table == "trained"), 1))
    plain, private, *others = in_turns(repeats, works)
    return Row(Path(name).name, table, plain, private, others[0] if others else None)


def markdown(rows: list[Row]) -> str:
    lines = [
        "| encoder | token table | plain step | with noise | times a plain step | Opacus 1.6, ghost | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs = ["", ""] if row.opacus is None else [f"{row.opacus:.3f} s", f"{row.opacus / row.private:.1f}"]
        ratio = row.private / row.plain
        cells = [row.encoder, row.table, f"{row.plain:.4f} s", f"{row.private:.4f} s", f"{ratio:.2f}", *theirs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", action="append", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.encoder:
            for table in PLANS:
                rows.append(measure(name, table, given.repeats, given.steps, Path(folder)))
                print(rows[-1], flush=True)
    print(markdown(rows))
    if given.out is not None:
        given.out.write_text(markdown(rows) + "\n")


if __name__ == "__main__":
    main()
