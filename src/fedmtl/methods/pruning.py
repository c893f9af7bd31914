"""Magnitude pruning while a federation runs: the server zeroes the smallest weights, and they stay zero.

Gradual, as in Zhu and Gupta 2017 (To prune, or not to prune), whose schedule is `cubic`. Where we differ: the steps are
rounds, and one threshold holds for all layers together.

The server says which weights are pruned, by masks that ride in its state and in every job. A client holds these weights
and their gradients at zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Config, PruningConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.filters.error_feedback import NAME as ERROR_FEEDBACK
from fedmtl.federation.filters.error_feedback import RESIDUAL
from fedmtl.federation.messages import ClientId, ClientInfo, State
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.model.multitask import BoundModel
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import PruningEvent, Zeros
from fedmtl.sharing.plan import FILTER_PREFIX, NO_EXTRA, Extra, Key, SharingPlan, Weights, slot_name
from fedmtl.sharing.weights import linear_weights
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import LocalClient, LocalMethod

NAME = "pruning"
MASK = "mask"


class Pruning(ServerMethod):
    """Zeroes the weights that are due after each round, sends the masks with every job, and records the sparsity."""

    name = NAME
    phase = "constraint"

    def __init__(self, settings: PruningConfig, prunable: Collection[str], linear: Collection[str]) -> None:
        self._settings, self._prunable, self._linear = settings, prunable, linear

    def start(self, state: State) -> Step:
        return Step(prune(state, self._settings, self._prunable))

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        return RoundSettings(extra=state.extra.get(NAME, NO_EXTRA))

    def after_aggregation(self, before: State, after: State) -> Step:
        return Step(prune(after, self._settings, self._prunable))

    def report(self, state: State) -> tuple[Event, ...]:
        """How sparse the model is after a round; counts, so that the shares can be recomputed."""
        counts = sparsity(state.weights, self._linear)
        event = PruningEvent(
            round=state.round,
            target=share_after(self._settings, state.round),
            pruned=sum(int(mask.sum()) for mask in pruned_weights(state).values()),
            linear=Zeros(**counts["linear"]),
            all=Zeros(**counts["all"]),
        )
        return (event,)

    def check(self, extra: Extra) -> None:
        if extra.values or set(extra.tensors) - {MASK}:
            raise ValueError("pruning has masks alone")
        for key, mask in extra.slot(MASK).items():
            if mask.dtype != torch.bool or key.name not in self._prunable:
                raise ValueError(f"{key.name} is no weight that is pruned")


def prunable_names(settings: PruningConfig, plan: SharingPlan, linear: Sequence[str]) -> frozenset[str]:
    """The weight matrices, of those given, that the server may prune; a ConfigError where a pattern finds none."""
    trained = [name for name in linear if plan.level(name) not in ("client", "fixed")]
    for pattern in settings.layers or ():
        if not any(fnmatchcase(name, pattern) for name in trained):
            raise ConfigError(
                f"training.pruning.layers: `{pattern}` matches no linear weight that trains at the server;"
                f" names look like {', '.join(linear[:3])}"
            )
    if not trained:
        raise ConfigError("training.pruning: all linear weights are fixed or stay at clients; change sharing.rules")
    patterns = settings.layers or ["*"]
    return frozenset(name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns))


def share_after(settings: PruningConfig, round_number: int) -> float:
    """The share of the prunable weights that is zero after this round."""
    done = min(1.0, max(0.0, (round_number - settings.start_round + 1) / settings.rounds))
    return settings.amount * (done if settings.schedule == "even" else 1.0 - (1.0 - done) ** 3)


def prune(state: State, settings: PruningConfig, names: Collection[str]) -> State:
    """The state with what was pruned at zero again, whoever moved it, and as many more as are due after its round.

    A weight that was pruned stays so. What does not train any more is left as it is, and not counted any more.
    """
    keys = [key for key in state.weights if key.name in names and state.plan.trains(key)]
    before = pruned_weights(state)
    pruned = {key: before[key] for key in keys if key in before}
    if settings.start_round <= state.round < settings.start_round + settings.rounds:
        total = sum(state.weights[key].numel() for key in keys)
        pruned = _smallest(state.weights, keys, pruned, round(share_after(settings, state.round) * total))
    zeroed = replace(state, weights={**state.weights, **without_pruned(state.weights, pruned)})
    return zeroed.with_extra(NAME, Extra(tensors={MASK: pruned}))


def pruned_weights(state: State) -> Mapping[Key, Tensor]:
    """Masks that are true where a weight stays zero."""
    return state.extra.get(NAME, NO_EXTRA).slot(MASK)


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


class PruningMask:
    """Zeroes pruned weights, or their gradients, by one multiplication over the part of a buffer that has any.

    `pruned` is true where a weight is; keys that do not train here are left out.
    """

    def __init__(self, bound: BoundModel, pruned: Mapping[Key, Tensor]) -> None:
        flat = bound.flat
        found = {span.start: (span, pruned[key]) for key, span in flat.spans.items() if key in pruned}
        start = min(found, default=0)
        self._span = slice(start, max((span.stop for span, _ in found.values()), default=0))
        size = self._span.stop - start
        self._factors = bound.buffers.take("unpruned", size, flat.values.dtype, flat.values.device).fill_(1.0)
        for span, mask in found.values():
            self._factors[span.start - start : span.stop - start].copy_(~mask.reshape(-1))

    def clear(self, buffer: Tensor) -> None:
        buffer[self._span].mul_(self._factors)


class PrunedClient(LocalMethod):
    """Pruned weights are zero from the start of a client's round to its end, as their gradients are."""

    name = NAME
    is_constraint = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._mask: PruningMask | None = None

    def restore(self, slots: Mapping[str, Weights], received: Extra) -> dict[str, Weights]:
        """What an encoding lost of weights that have been pruned since is not sent any more."""
        mask, lost = received.slot(MASK), slot_name(ERROR_FEEDBACK, RESIDUAL, FILTER_PREFIX)
        return {
            slot: without_pruned(values, mask) if mask and slot == lost else values for slot, values in slots.items()
        }

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        masks = received.slot(MASK)
        self._mask = PruningMask(client.bound, masks) if masks else None
        if self._mask is not None:
            self._mask.clear(client.bound.flat.values)

    def task_gradient(self, task: str, reached: Collection[Key], gradients: Tensor) -> None:
        if self._mask is not None:
            self._mask.clear(gradients)

    def stepped(self, values: Tensor) -> None:
        # Moments of before a weight was pruned would move it: its gradient alone being zero is not enough.
        if self._mask is not None:
            self._mask.clear(values)


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    return None if config.training.pruning is None else {}


def _open(setup: ServerSetup) -> Pruning | None:
    settings = setup.config.training.pruning
    if settings is None:
        return None
    linear = linear_weights(setup.model)
    return Pruning(settings, prunable_names(settings, setup.plan, linear), frozenset(linear))


def check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why what came with a job is no set of masks."""
    masks = extra.slot(MASK).values()
    is_fine = not extra.values and set(extra.tensors) <= {MASK} and all(mask.dtype == torch.bool for mask in masks)
    return None if is_fine else "the job's masks are no masks"


CAPABILITY = Capability(NAME, PrunedClient, _client_options, _open, check_received=check_received)
