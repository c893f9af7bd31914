"""Ordinal regression (Cao et al. 2020, CORAL), a kind of task of another package: labels that have an order.

    import ordinal                                 # registers it
    fedmtl.run({"tasks": {"stars": {"kind": "ordinal", "labels": ["bad", "fair", "good"], ...}}})

K labels have K - 1 logits, of lying above each label but the last, and the loss adds up their binary cross-entropies.
As in CORAL the logits never cross, so that no probability is negative: each is the one before less a positive step.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl import Capability, LabelledKind, Task, register


def above(outputs: Tensor) -> Tensor:
    """The logits of lying above the first label, the second, ..., of a head's outputs."""
    first = outputs[..., :1]
    return torch.cat([first, first - F.softplus(outputs[..., 1:]).cumsum(-1)], -1)


class Ordinal(LabelledKind):
    name = "ordinal"
    metrics = (*LabelledKind.metrics, "mae")

    def num_outputs(self, task: Task) -> int:
        return len(task.labels) - 1

    def losses(self, task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
        is_above = labels.unsqueeze(-1) > torch.arange(outputs.shape[-1], device=labels.device)
        return F.binary_cross_entropy_with_logits(above(outputs), is_above.to(outputs.dtype), reduction="none").sum(-1)

    def divergences(self, task: Task, first: Tensor, second: Tensor) -> Tensor:
        one, other = above(first), above(second)
        return ((one.sigmoid() - other.sigmoid()) * (one - other)).sum(-1)

    def probabilities(self, task: Task, outputs: np.ndarray) -> np.ndarray:
        shares = above(torch.from_numpy(outputs).double()).sigmoid().numpy()
        return -np.diff(np.pad(shares, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), axis=1)

    def score(self, task: Task, sums: Any) -> tuple[dict[str, Any], str | None]:
        """By how many labels answers are off, on average, beside the metrics of a classification."""
        values, marked = super().score(task, sums)
        ranks, total = np.arange(len(task.labels)), int(sums.confusion.sum())
        off = float((abs(ranks[:, None] - ranks) * sums.confusion).sum())
        return {**values, "mae": off / total if total else "no examples"}, marked


register(Capability("ordinal", task_kind=Ordinal))
