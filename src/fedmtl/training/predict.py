"""Outputs of a bound model for many examples."""

from __future__ import annotations

import numpy as np
import torch

from fedmtl.model.binding import BoundModel
from fedmtl.tasks.batches import Shard, collate, sorted_batches
from fedmtl.timing import timed
from fedmtl.training.objective import to_tensors


@torch.inference_mode()
@timed("scoring", whole=True)
def predict(
    bound: BoundModel, task: str, shard: Shard, batch_size: int, device: torch.device
) -> tuple[np.ndarray, float]:
    """Return the outputs in the order of `shard.indices`, and the summed loss."""
    # A client whose training failed leaves the model in training mode.
    model = bound.use(task).eval()
    of_task = model.tasks[task]
    outputs = [np.zeros((0, of_task.kind_of.num_outputs(of_task)), dtype=np.float32)]
    positions = [np.zeros(0, dtype=np.int64)]
    loss = 0.0
    for batch in sorted_batches(shard, batch_size):
        inputs, labels = to_tensors(collate(shard, batch, model.pad_id, bound.index), device)
        logits = model(task, inputs)
        loss += float(of_task.kind_of.losses(of_task, logits, labels).double().sum())
        outputs.append(logits.float().cpu().numpy())
        positions.append(batch)
    order = np.argsort(np.concatenate(positions), kind="stable")
    ranks = np.argsort(np.argsort(shard.indices, kind="stable"), kind="stable")
    return np.concatenate(outputs)[order][ranks], loss
