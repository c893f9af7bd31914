"""What a step with noise costs (`privacy.example`): against a plain step, and against Opacus' ghost clipping.

    python benchmarks/private_step.py --encoder tiny --encoder FOLDER [--repeats 5] [--steps 4] [--out FILE.md]
    python benchmarks/private_step.py --encoder tiny --encoder FOLDER --stack 8 [--device cuda] [--seconds 60]

The workload is synthetic: 64 texts (median 16 words of the encoder's vocabulary), always the same batch of 64, one task
with two labels, mean pooling, AdamW, no dropout, single precision, one thread. A step is all that a client does in it:
tokens to tensors, forward, backward, clipping, noise (AES, on every value that moves), optimizer. Rows are with the
token table fixed and trained; where it is trained, a plain step moves the whole table too, as one with noise must.
Opacus (where it is installed; 1.6 was) computes transformers' BertModel with the same values and batch, padded to the
longest text, with `grad_sample_mode="ghost"`, AdamW, and position ids for every row, which it needs. CPU seconds of one
thread are compared, in turns, so that other work on the machine disturbs all alike; the smallest of the repeats counts.

With `--stack`, so many clients with 512 such texts each take steps at once, in bf16 on a GPU: plain ones on batches of
64, and ones with noise on lots of 64 drawn by chance, which may need a second pass. The clock runs from the plan of a
round's batches until the device has made its last step; values are loaded before. The median of the repeats counts, the
first time of each (which records the steps) does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from fedmtl.config import ModelConfig, TrainingConfig
from fedmtl.methods.example_gradients import PrivateGradients, PrivateStack
from fedmtl.methods.example_privacy import NAME
from fedmtl.model.bert.layout import mean_pool
from fedmtl.model.multitask import BoundModel, Buffers, open_model
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import Shard, collate
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import tokenize
from fedmtl.training.local import train
from fedmtl.training.local_method import LocalMethods, Release, local_settings
from fedmtl.training.stacked import loop
from fedmtl.training.stacked.loop import Stacks
from fedmtl.training.stacked.plan import Member

BATCH, WIDTH = 64, 128
CPU = torch.device("cpu")
TASK = Task("single", "classification", ("a",), "y", "accuracy", ("no", "yes"), pool="mean", dropout=0.0)
PLANS = {
    "fixed": SharingPlan((("heads.*", "task"), ("embeddings.word*", "fixed"), ("*", "all"))),
    "trained": SharingPlan((("heads.*", "task"), ("*", "all"))),
}
OPTIONS = {
    "epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "examples_at_once": None,
    "max_sampling_rate": None, "masked": False,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """CPU seconds of one step."""

    encoder: str
    table: str
    plain: float
    private: float
    opacus: float | None


def make_shard(tokenizer: Any, cache: Path, number: int = BATCH) -> Shard:
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 1)
    lengths = np.clip(np.round(16 * np.exp(0.6 * rng.standard_normal(number))), 2, 60).astype(int)
    texts = [" ".join(rng.choice(words, length)) for length in lengths]
    folder, _ = tokenize(TASK, (texts,), tokenizer, WIDTH, cache)
    return Shard(folder, rng.integers(0, 2, number), np.arange(number))


@dataclass(frozen=True)
class StackedRow:
    """Seconds of one step of all clients, and the most memory of the device in GiB."""

    encoder: str
    table: str
    clients: int
    plain: float
    private: float
    memory: float


STACKED_TEXTS = 512
make_steps = loop._run


def stacked_round(
    model: Any, table: str, shard: Shard, folder: Path, clients: int, steps: int, *, device: Any, private: bool
) -> Any:
    """A function that trains all clients for a round, and returns its seconds."""
    plan = PLANS[table]
    training = TrainingConfig(
        num_rounds=1, local_steps=steps, batch_size=BATCH, learning_rate=1e-4, schedule="constant"
    )
    settings = local_settings(training, {"single": None}, {"single": 1.0}, keep_optimizer=False)
    settings = replace(settings, methods={NAME: OPTIONS} if private else {})
    keys = plan.keys(model.canonical(), ["single"], "")["single"]
    weights = initial_weights(model, plan)
    values = {name: weights[key] for name, key in keys.items()}
    fixed = frozenset(name for name, key in keys.items() if not plan.trains(key))
    stacks = Stacks(model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    members = [Member(f"c{k}", (TASK,), {"single": shard}, k, keys, None, fixed=fixed) for k in range(clients)]
    rounds, spent = iter(range(1, 1000)), []

    def timed(stack: Any, *parts: Any) -> Any:
        wait(device)
        started = time.perf_counter()
        records = make_steps(stack, *parts)
        wait(device)
        spent.append((time.perf_counter() - started) / steps)
        return records

    def run() -> float:
        number, entered = next(rounds), members
        if private:
            entered = [
                PrivateStack(OPTIONS).enter(
                    member, model, settings, number, partial(Release, bytes(32), f"{k}.{number}", folder / f"client{k}")
                )
                for k, member in enumerate(members)
            ]
        with patch.object(loop, "_run", timed):
            loop.train_stack(stacks, entered, [values] * clients, settings, round_number=number)
        return spent[-1]

    return run


def measure_stacked(name: str, table: str, given: argparse.Namespace, folder: Path, ends: float) -> StackedRow | None:
    device = torch.device(given.device)
    config = ModelConfig(server_model=name, max_length=WIDTH, encoder_dropout=0.0)
    encoder, model = open_model(config, {"single": TASK}, 0)
    shard = make_shard(encoder.tokenizer, folder / "tokens", STACKED_TEXTS)
    works = [
        stacked_round(
            model,
            table,
            shard,
            folder / name.replace("/", "_"),
            given.stack,
            given.steps or 64,
            device=device,
            private=private,
        )
        for private in (False, True)
    ]
    found: list[list[float]] = [[], []]
    for number in range(given.repeats + 1):
        for seconds, work in zip(found, works, strict=True):
            seconds.append(work())
        if time.monotonic() > ends and number:
            break
    if min(map(len, found)) < 2:
        return None
    plain, private = (statistics.median(seconds[1:]) for seconds in found)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return StackedRow(Path(name).name, table, given.stack, plain, private, memory)


def wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stacked_markdown(rows: list[StackedRow]) -> str:
    lines = [
        "| encoder | token table | clients | plain step | with noise | times a plain step | GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{1000 * row.plain:.2f} ms", f"{1000 * row.private:.2f} ms", f"{row.private / row.plain:.2f}"]
        lines.append(f"| {' | '.join([row.encoder, row.table, str(row.clients), *times, f'{row.memory:.1f}'])} |")
    return "\n".join(lines)


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


def run_stacked(given: argparse.Namespace) -> None:
    began, rows = time.monotonic(), []
    pairs = [(name, table) for table in PLANS for name in given.encoder]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, table) in enumerate(pairs, 1):
            row = measure_stacked(name, table, given, Path(folder) / table, began + given.seconds * number / len(pairs))
            if row is not None:
                rows.append(row)
                print(row, flush=True)
    print(stacked_markdown(rows))
    if given.out is not None:
        given.out.write_text(stacked_markdown(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", action="append", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a round (default: 4, of a stack 64)")
    parser.add_argument("--stack", type=int, default=0, help="so many clients at once, in place of one")
    parser.add_argument("--device", default="cuda", help="of a stack (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a stack: begin no more repeats after this")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if given.stack:
        run_stacked(given)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.encoder:
            for table in PLANS:
                rows.append(measure(name, table, given.repeats, given.steps or 4, Path(folder)))
                print(rows[-1], flush=True)
    print(markdown(rows))
    if given.out is not None:
        given.out.write_text(markdown(rows) + "\n")


if __name__ == "__main__":
    main()
