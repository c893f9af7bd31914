"""The weights of a plan: which values a run starts with, and how many there are in every scope and layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from fedmtl.sharing.keys import ADAPTERS, Weights, layer_of
from fedmtl.sharing.plan import SharingPlan


class NamedParameters(Protocol):
    """A model whose parameters have canonical names; `canonical` gives the module and the attribute of each."""

    @property
    def tasks(self) -> Mapping[str, object]: ...

    def canonical(self) -> Mapping[str, tuple[nn.Module, str]]: ...


def initial_weights(model: NamedParameters, plan: SharingPlan) -> Weights:
    """One value for every key of the plan, all equal to the model's own; what stays at clients is not here."""
    weights: Weights = {}
    for view in plan.keys(model.canonical(), list(model.tasks), "").values():
        for name, key in view.items():
            if not key.scope.startswith("client:"):
                module, leaf = model.canonical()[name]
                weights.setdefault(key, getattr(module, leaf).detach().cpu().clone())
    return weights


def scope_counts(weights: Weights) -> list[dict[str, Any]]:
    """Parameters and tensors of every scope, in order of appearance."""
    counts: dict[str, dict[str, Any]] = {}
    for key, value in weights.items():
        level = key.scope.partition(":")[0]
        entry = counts.setdefault(key.scope, {"scope": key.scope, "level": level, "parameters": 0, "tensors": 0})
        entry["parameters"] += value.numel()
        entry["tensors"] += 1
    return list(counts.values())


def layer_counts(model: NamedParameters, plan: SharingPlan) -> list[dict[str, Any]]:
    """Layers in model order with their level (the levels, where a layer has several) and their size."""
    layers: dict[str, dict[str, Any]] = {}
    for name, (module, leaf) in model.canonical().items():
        entry = layers.setdefault(layer_of(name), {"layer": layer_of(name), "level": [], "parameters": 0})
        if plan.level(name) not in entry["level"]:
            entry["level"].append(plan.level(name))
        entry["parameters"] += getattr(module, leaf).numel()
    return [{**entry, "level": ", ".join(entry["level"])} for entry in layers.values()]


def linear_weights(model: NamedParameters) -> list[str]:
    """Names of the weight matrices of the encoder's and the heads' linear layers, in model order."""
    return [
        name
        for name, (module, leaf) in model.canonical().items()
        if isinstance(module, nn.Linear) and leaf == "weight" and not name.startswith(ADAPTERS)
    ]


def count_parameters(weights: Weights) -> int:
    return sum(value.numel() for value in weights.values())


def count_trainable(weights: Weights) -> int:
    """Those of all values that may move."""
    return sum(value.numel() for key, value in weights.items() if key.scope != "fixed")
