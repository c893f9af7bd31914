"""How a task's examples are dealt to its clients.

Label skew by a Dirichlet distribution follows Hsu, Qi and Brown, "Measuring the Effects of Non-Identical
Data Distribution for Federated Visual Classification" (2019); as in later work each label is split over the
clients, so every example is used, and sizes differ too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmtl.config import PartitionConfig
from fedmtl.errors import DataError
from fedmtl.seeds import derive_seed
from fedmtl.tasks.kinds.protocol import Labels, TaskKind

Indices = npt.NDArray[np.int64]


def partition(
    labels: Labels,
    column: list[str] | None,
    clients: Sequence[str],
    settings: PartitionConfig,
    *,
    seed: int,
    task: str,
    kind: TaskKind,
) -> dict[str, Indices]:
    """Each client's examples as sorted indices; every example goes to exactly one client.

    A single client gets all of them, whatever the settings.
    """
    assert clients, f"nobody to deal {task} to"
    random = np.random.Generator(np.random.PCG64(derive_seed(seed, "partition", task)))
    count = len(clients)
    match settings.kind if count > 1 else "iid":
        case "iid":
            parts = np.array_split(random.permutation(len(labels)), count)
        case "quantity":
            parts = _deal(np.arange(len(labels)), count, settings.alpha, random)
        case "dirichlet":
            parts = _by_label(kind.groups(labels), count, settings.alpha, random)
        case "column":
            assert column is not None, "partition by column without its values"
            parts = _by_value(column, count, f"{settings.column}", task)
    dealt = {client: np.sort(part).astype(np.int64) for client, part in zip(clients, parts, strict=True)}
    _check_sizes(dealt, settings, task)
    return dealt


def _deal(indices: Indices, count: int, alpha: float, random: np.random.Generator) -> list[Indices]:
    """The indices, shuffled and cut into parts whose shares are one Dirichlet draw."""
    shares = random.dirichlet(np.full(count, alpha))
    cuts = np.rint(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
    return np.split(random.permutation(indices), cuts)


def _by_label(classes: npt.NDArray[np.generic], count: int, alpha: float, random: np.random.Generator) -> list[Indices]:
    dealt = [_deal(np.flatnonzero(classes == value), count, alpha, random) for value in np.unique(classes)]
    return [np.concatenate([parts[client] for parts in dealt] or [np.zeros(0, np.int64)]) for client in range(count)]


def _by_value(column: list[str], count: int, name: str, task: str) -> list[Indices]:
    """Values, the most frequent first, each to the client with the fewest examples so far."""
    counts = Counter(column)
    if len(counts) < count:
        raise DataError(
            f"{task}: column {name} has {len(counts)} values for {count} clients; "
            f"use {len(counts)} clients or fewer, or another partition.column"
        )
    owner: dict[str, int] = {}
    sizes = [0] * count
    for value, size in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        owner[value] = sizes.index(min(sizes))
        sizes[owner[value]] += size
    owners = np.array([owner[value] for value in column], dtype=np.int64)
    return [np.flatnonzero(owners == client) for client in range(count)]


def _check_sizes(dealt: dict[str, Indices], settings: PartitionConfig, task: str) -> None:
    short = [client for client, part in dealt.items() if len(part) < settings.min_examples]
    if not short:
        return
    skewed = settings.kind in ("dirichlet", "quantity")
    raise DataError(
        f"{short[0]}: gets {len(dealt[short[0]])} of {sum(map(len, dealt.values()))} examples of {task}, "
        f"fewer than partition.min_examples {settings.min_examples}"
        + (f", at partition.alpha {settings.alpha:g}; raise partition.alpha," if skewed else ";")
        + f" use fewer clients than {len(dealt)}, "
        + ("more examples, or a lower partition.min_examples" if settings.min_examples > 1 else "or more examples")
    )
