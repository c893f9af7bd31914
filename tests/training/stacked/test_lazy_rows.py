"""Rows that move only when they are used, against AdamW on the whole table; on a GPU or under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from fedmtl.config import TrainingConfig
from fedmtl.training.local_method import local_settings
from fedmtl.training.stacked.blocks import Block, Rates, make_block

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")

CLIENTS, ROWS, WIDTH, PLACES = 3, 20, 64, 12


def make_table() -> Block:
    block = make_block(
        {"table": (ROWS, WIDTH)}, slice(0, CLIENTS), {"table": 0.0}, 1.0, 2,
        torch.float32, DEVICE, torch.float32, torch.float32,
    )  # fmt: skip
    block.values.copy_(torch.randn(CLIENTS, ROWS * WIDTH, generator=torch.Generator().manual_seed(0)))
    return block


@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("age", [0, 25])
def test_rows_end_where_adamw_on_all_of_them_would_have_moved_them(beta1: float, age: int) -> None:
    from fedmtl.training.stacked.blocks import _step_plainly
    from fedmtl.training.stacked.triton_adamw import LazyRows

    num_steps = 40
    training = TrainingConfig(betas=(beta1, 0.99), learning_rate=0.05)
    settings = local_settings(training, {"t": None}, {"t": 1.0}, keep_optimizer=False)
    generator = torch.Generator().manual_seed(1)
    dense, sparse = make_table(), make_table()
    lazy = LazyRows(sparse, ROWS, 64, settings)
    # After some steps there is something kept of them.
    for slot in range(2 if age else 0):
        kept = torch.rand(CLIENTS, ROWS * WIDTH, generator=generator) / 10
        for table in (dense, sparse):
            table.slots[slot].copy_(kept)
    for step in range(num_steps):
        # Most rows are used now and then, some never; the second client has no steps after the tenth.
        local = (torch.randint(0, 100, (CLIENTS, PLACES), generator=generator) ** 2 // 600).to(DEVICE)
        ids = (local + torch.arange(CLIENTS, device=DEVICE)[:, None] * ROWS).view(-1)
        gradient = torch.randn(len(ids), WIDTH, generator=generator).to(DEVICE)
        rate = torch.tensor([0.05, 0.05 if step < 10 else -1.0, 0.02 * (step % 3)], device=DEVICE)
        corrections = [
            torch.full_like(rate, 1 - beta1 ** (age + step + 1)),
            torch.full_like(rate, (1 - 0.99 ** (age + step + 1)) ** 0.5),
        ]
        rates = Rates(rate, *corrections, torch.tensor([1.0, 0.5, 0.25], device=DEVICE))
        lazy.history[step] = torch.stack([rates.rate, rates.first, rates.second])
        lazy.open(ids)
        lazy.take(gradient)
        dense.gradients.zero_().view(-1, WIDTH).index_add_(0, ids, gradient)
        torch.testing.assert_close(lazy.squares(), dense.gradients.square().sum(1))
        used = ids.unique()
        torch.testing.assert_close(
            sparse.values.view(-1, WIDTH)[used], dense.values.view(-1, WIDTH)[used], rtol=1e-4, atol=1e-5
        )
        lazy.step(rates)
        _step_plainly(dense, rates, settings)
    assert not torch.allclose(sparse.values, dense.values, rtol=1e-4, atol=1e-5)
    lazy.finish()
    torch.testing.assert_close(sparse.values, dense.values, rtol=1e-4, atol=1e-5)
