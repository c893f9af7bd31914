"""Magnitude pruning while a federation runs: the server zeroes the smallest weights, and they stay zero.

Gradual, as in Zhu and Gupta 2017 (To prune, or not to prune), whose schedule is `cubic`. Where we differ: the steps are
rounds, and one threshold holds for all layers together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from fedmtl.config import PruningConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import State
from fedmtl.sharing.keys import Key, Weights
from fedmtl.sharing.plan import SharingPlan


def prunable_names(settings: PruningConfig, plan: SharingPlan, linear: Sequence[str]) -> frozenset[str]:
    """The weight matrices, of those given, that the server may prune; a ConfigError where a pattern finds none."""
    own = [name for name in linear if plan.level(name) not in ("client", "fixed")]
    for pattern in settings.layers or ():
        if not any(fnmatchcase(name, pattern) for name in own):
            raise ConfigError(
                f"training.pruning.layers: `{pattern}` matches no linear weight that trains at the server;"
                f" names look like {', '.join(linear[:3])}"
            )
    if not own:
        raise ConfigError("training.pruning: all linear weights are fixed or stay at clients; change sharing.rules")
    patterns = settings.layers or ["*"]
    return frozenset(name for name in own if any(fnmatchcase(name, pattern) for pattern in patterns))


def share_after(settings: PruningConfig, round_number: int) -> float:
    """The share of the prunable weights that is zero after this round."""
    done = min(1.0, max(0.0, (round_number - settings.start_round + 1) / settings.rounds))
    return settings.amount * (done if settings.schedule == "even" else 1.0 - (1.0 - done) ** 3)


def prune(state: State, settings: PruningConfig, names: Collection[str]) -> State:
    """The state with what was pruned at zero again, whoever moved it, and as many more as are due after its round.

    A weight that was pruned stays so. What has become fixed is left as it is, and not counted any more.
    """
    keys = [key for key in state.weights if key.name in names and key.scope != "fixed"]
    pruned = {key: state.pruned[key] for key in keys if key in state.pruned}
    if settings.start_round <= state.round < settings.start_round + settings.rounds:
        total = sum(state.weights[key].numel() for key in keys)
        pruned = _smallest(state.weights, keys, pruned, round(share_after(settings, state.round) * total))
    return replace(state, weights={**state.weights, **without_pruned(state.weights, pruned)}, pruned=pruned)


def without_pruned(values: Mapping[Key, Tensor], pruned: Mapping[Key, Tensor]) -> Weights:
    """The values, zero where they are pruned."""
    return {key: value.masked_fill(pruned[key], 0.0) if key in pruned else value for key, value in values.items()}


def sparsity(weights: Weights, linear: Collection[str]) -> dict[str, dict[str, int]]:
    """How many weights there are and how many of them are zero, in linear layers and in all."""
    counts = {"linear": {"weights": 0, "zeros": 0}, "all": {"weights": 0, "zeros": 0}}
    for key, value in weights.items():
        zeros = value.numel() - int(torch.count_nonzero(value))
        for part in ("linear", "all") if key.name in linear else ("all",):
            counts[part]["weights"] += value.numel()
            counts[part]["zeros"] += zeros
    return counts


def _smallest(weights: Weights, keys: Sequence[Key], pruned: Mapping[Key, Tensor], count: int) -> dict[Key, Tensor]:
    """Masks of `count` entries: those that are pruned already, then the smallest; of equal ones the first."""
    sizes = np.concatenate([_sizes(weights[key], pruned.get(key)) for key in keys]) if keys else np.empty(0)
    count = max(count, sum(int(mask.sum()) for mask in pruned.values()))
    if not count:
        return {}
    greatest = np.partition(sizes, count - 1)[count - 1]
    chosen = sizes < greatest
    chosen[np.flatnonzero(sizes == greatest)[: count - np.count_nonzero(chosen)]] = True
    masks = torch.split(torch.from_numpy(chosen), [weights[key].numel() for key in keys])
    return {key: mask.view(weights[key].shape).clone() for key, mask in zip(keys, masks, strict=True)}


def _sizes(value: Tensor, mask: Tensor | None) -> np.ndarray:
    sizes = value.abs()
    return (sizes if mask is None else sizes.masked_fill(mask, -1.0)).reshape(-1).numpy()
