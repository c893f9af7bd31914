"""The weights of a plan: which values a run starts with, and how many there are in every scope and layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from fedmtl.sharing.plan import ADAPTERS, SharingPlan, Weights, layer_of

if TYPE_CHECKING:
    # Workers cut and merge weights, and write no events.
    from fedmtl.runs.events import LayerFacts, ScopeFacts


class NamedParameters(Protocol):
    """A model whose parameters have canonical names; `canonical` gives the module and the attribute of each."""

    @property
    def tasks(self) -> Mapping[str, object]: ...

    def canonical(self) -> Mapping[str, tuple[nn.Module, str]]: ...


def initial_weights(model: NamedParameters, plan: SharingPlan) -> Weights:
    """Return one value for every key of the plan, equal to the model's; what stays at clients is not here."""
    weights: Weights = {}
    for view in plan.keys(model.canonical(), list(model.tasks), "").values():
        for name, key in view.items():
            if not key.scope.startswith("client:"):
                module, leaf = model.canonical()[name]
                weights.setdefault(key, getattr(module, leaf).detach().cpu().clone())
    return weights


def scope_counts(weights: Weights) -> list[ScopeFacts]:
    """Parameters and tensors of every scope, in order of appearance."""
    from fedmtl.runs.events import ScopeFacts

    sizes: dict[str, list[int]] = {}
    for key, value in weights.items():
        sizes.setdefault(key.scope, []).append(value.numel())
    return [
        ScopeFacts(scope=scope, level=scope.partition(":")[0], parameters=sum(counts), tensors=len(counts))
        for scope, counts in sizes.items()
    ]


def layer_counts(model: NamedParameters, plan: SharingPlan) -> list[LayerFacts]:
    """Layers in model order with their level (the levels, where a layer has several) and their size."""
    from fedmtl.runs.events import LayerFacts

    levels: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for name, (module, leaf) in model.canonical().items():
        layer = layer_of(name)
        levels.setdefault(layer, {})[plan.level(name)] = None
        sizes[layer] = sizes.get(layer, 0) + getattr(module, leaf).numel()
    return [LayerFacts(layer=layer, level=", ".join(levels[layer]), parameters=size) for layer, size in sizes.items()]


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
