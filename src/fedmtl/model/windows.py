"""One vector for a text from those of its windows: their mean, the largest of each feature, or a learnt mean.

A task that learns it has one vector more, `heads.<task>.windows.weight`, which is shared as its head is: a window
counts by the softmax, over the text's windows, of its product with that vector (Yang et al. 2016, without a hidden
layer). The vector starts at zero, which is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.tasks.task import Task

LEAF = "windows.weight"


class WindowPools(nn.Module):
    """Pools windows as each task says; it has the vectors of tasks that learn how."""

    def __init__(self, tasks: Mapping[str, Task], hidden_size: int) -> None:
        super().__init__()
        self._kinds = {name: task.windows.pool for name, task in tasks.items() if task.windows is not None}
        for name, task in tasks.items():
            if learns_windows(task):
                layer = nn.Linear(hidden_size, 1, bias=False)
                nn.init.zeros_(layer.weight)
                self._modules[name] = nn.ModuleDict({"windows": layer})

    def forward(self, task: str, vectors: Tensor, windows: Tensor | None) -> Tensor:
        """One vector per text; without `windows` every text has one, and those are returned as they are."""
        parent: Any = self._modules.get(task)
        weight = None if parent is None else parent["windows"].weight
        if windows is None and weight is None:
            return vectors
        if windows is None:
            # The first step says what moves: the weight has a gradient of zero where it weighs nothing, and not none.
            windows = torch.arange(len(vectors), device=vectors.device).unsqueeze(1)
        return pool_windows(vectors, windows, self._kinds[task], weight)


def learns_windows(task: Task) -> bool:
    """Whether the task has a vector that its windows are weighed by."""
    return task.windows is not None and task.windows.learns and not task.kind_of.by_word


def pool_windows(vectors: Tensor, windows: Tensor, pool: str, weight: Tensor | None = None) -> Tensor:
    """(..., rows, width) and the rows of each text (..., texts, most), -1 where it has no more -> (..., texts, width).

    `weight` (..., 1, width) is what windows are weighed by with `attention`. A text has at least one row.
    """
    is_there = (windows >= 0).unsqueeze(-1)
    width = vectors.shape[-1]
    index = windows.clamp(min=0).flatten(-2).unsqueeze(-1)
    of_texts = vectors.gather(-2, index.expand(*index.shape[:-1], width)).view(*windows.shape, width)
    if pool == "max":
        return of_texts.masked_fill(~is_there, -torch.inf).amax(-2)
    if pool == "mean":
        real = is_there.to(vectors.dtype)
        return (of_texts * real).sum(-2) / real.sum(-2)
    assert weight is not None, "attention over windows has a weight"
    scores = (of_texts * weight.unsqueeze(-2)).sum(-1, keepdim=True)
    shares = scores.masked_fill(~is_there, -torch.inf).softmax(-2)
    return (of_texts * shares).sum(-2)
