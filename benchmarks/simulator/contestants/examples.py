"""A client's examples as cached tokens, and batches of them; numpy and torch only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from simulator.contestants.telling import tell_first_batch

TASKS = ("singles", "pairs", "scores")
SAMPLES = 300
BATCH = 32
WINDOW = 8


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    segments: Tensor
    mask: Tensor
    labels: Tensor


class Tokens:
    """The tokens of all clients of a population, `SAMPLES` examples each, one client after the other."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.ids, self.segments = arrays["ids"], arrays["segments"]
            self.offsets, self.labels = arrays["offsets"], arrays["labels"]
        self._served = 0

    def take_count(self) -> int:
        """How many examples were put into batches since the last call: what was trained, not what was meant."""
        count, self._served = self._served, 0
        return count

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def num_clients(self) -> int:
        return len(self.labels) // SAMPLES

    def examples(self, client: int) -> np.ndarray:
        return np.arange(client * SAMPLES, (client + 1) * SAMPLES)

    def batch(self, batch: np.ndarray, task: str, width: int | None = None) -> Batch:
        """Padded to its longest example, or to `width`."""
        if not self._served:
            tell_first_batch()
        self._served += len(batch)
        lengths = self.lengths[batch]
        columns = np.arange(width or int(lengths.max()))
        real = columns < lengths[:, None]
        positions = (self.offsets[batch][:, None] + columns)[real]
        ids = np.zeros(real.shape, np.int64)
        segments = np.zeros(real.shape, np.int64)
        ids[real], segments[real] = self.ids[positions], self.segments[positions]
        labels = self.labels[batch]
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(segments),
            torch.from_numpy(real.astype(np.int64)),
            torch.from_numpy(labels if task == "scores" else labels.astype(np.int64)),
        )

    def shuffled(self, client: int, rng: np.random.Generator) -> list[np.ndarray]:
        """One epoch in random order."""
        order = rng.permutation(self.examples(client))
        return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]

    def bucketed(self, client: int, rng: np.random.Generator) -> list[np.ndarray]:
        """One epoch whose batches hold examples of similar length, in random order."""
        order = rng.permutation(self.examples(client))
        batches: list[np.ndarray] = []
        for start in range(0, len(order), BATCH * WINDOW):
            window = order[start : start + BATCH * WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            batches += [window[i : i + BATCH] for i in range(0, len(window), BATCH)]
        return [batches[i] for i in rng.permutation(len(batches))]


def task_of(client: int) -> str:
    return TASKS[client % len(TASKS)]
