"""Outputs of a bound model for many examples."""

from __future__ import annotations

import numpy as np
import torch

from fedmtl.model.binding import BoundModel
from fedmtl.tasks.batches import Shard, collate, sorted_batches
from fedmtl.training.local import to_tensors
from fedmtl.training.objective import example_losses


@torch.inference_mode()
def predict(
    bound: BoundModel, task: str, shard: Shard, batch_size: int, device: torch.device
) -> tuple[np.ndarray, float]:
    """The outputs in the order of `shard.indices`, and the summed loss."""
    model = bound.use(task)
    outputs: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    loss = 0.0
    for batch in sorted_batches(shard, batch_size):
        inputs, labels = to_tensors(collate(shard, batch, model.pad_id, bound.index), device)
        logits = model(task, inputs)
        loss += float(example_losses(model.tasks[task], logits, labels).double().sum())
        outputs.append(logits.float().cpu().numpy())
        positions.append(batch)
    order = np.argsort(np.concatenate(positions), kind="stable")
    ranks = np.argsort(np.argsort(shard.indices, kind="stable"), kind="stable")
    return np.concatenate(outputs)[order][ranks], loss
