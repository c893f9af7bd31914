"""In which order a client with several tasks works through their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Step = tuple[str, np.ndarray]


def alternate(batches: Mapping[str, Sequence[np.ndarray]]) -> list[Step]:
    """Every batch once, each task's spread evenly over the epoch: two equal tasks take turns."""
    placed = [((number + 0.5) / len(own), task, number) for task, own in batches.items() for number in range(len(own))]
    return [(task, batches[task][number]) for _, task, number in sorted(placed)]
