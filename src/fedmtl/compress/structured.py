"""Structured pruning: attention heads, feed-forward neurons and whole layers leave a BERT.

Neurons go by the product of what leads in and what leads out, |W_in| |W_out|, as many in every layer, since a config
has one `intermediate_size`. That needs no text, which a server does not have. Layers go from the top (Sajjad et al.
2020, On the Effect of Dropping Layers of Pre-trained Transformer Models), heads as `cut_heads` says. Without neurons or
layers it stays a plain BERT, only smaller; one with fewer heads is loaded by `model/kept_heads.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.compress.cut_heads import HEAD, constants, kept_columns
from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.model.bert_layout import BertLayout
from fedmtl.model.encoder import Encoder, describe_encoder
from fedmtl.model.kept_heads import build_encoder, keep_heads
from fedmtl.model.keys import LOG_VARIANCE, Weights
from fedmtl.model.multitask import build_model
from fedmtl.model.plan import SharingPlan
from fedmtl.model.saved import SavedModel, save_model

LAYER = re.compile(r"encoder\.layer\.\d+\..*")
# What a neuron is made of: the part of a layer's values, and their dimension that counts neurons.
NEURON = {"intermediate.dense.weight": 0, "intermediate.dense.bias": 0, "output.dense.weight": 1}


@dataclass(frozen=True)
class CutFolder:
    """Where a cut model lies: its encoder, and the model with the tasks' heads."""

    encoder: Path
    model: Path


def cut(saved: SavedModel, ffn: float, layers: int, heads: float = 0.0) -> SavedModel:
    """The model without that share of each layer's feed-forward neurons and attention heads, and its topmost layers."""
    layout = _layout(saved)
    if layers >= layout.num_layers:
        raise ModelError(f"--layers: found {layers}, but the encoder has {layout.num_layers}; leave one at least")
    config = type(saved.encoder.module.config).from_dict(saved.encoder.module.config.to_dict())
    config.num_hidden_layers = layout.num_layers - layers
    config.intermediate_size -= round(ffn * config.intermediate_size)
    if config.intermediate_size < 1:
        raise ModelError(f"--ffn: found {ffn:g}, which leaves no neuron; write a smaller share")
    num_heads = layout.num_heads - round(heads * layout.num_heads)
    if num_heads < 1 or (heads and num_heads == layout.num_heads):
        raise ModelError(
            f"--heads: found {heads:g}, which {'takes' if num_heads else 'leaves'} none of {layout.num_heads} heads;"
            f" write a {'larger' if num_heads else 'smaller'} share"
        )
    keep_heads(config, num_heads)
    weights: Weights = {key: value for key, value in saved.weights.items() if not LAYER.fullmatch(key.name)}
    for number in range(config.num_hidden_layers):
        weights |= _layer(saved, number, config.intermediate_size, num_heads)
    weights = {key: weights[key] for key in saved.weights if key in weights}
    encoder = _encoder(saved, config, weights)
    weighed = any(key.name.endswith(LOG_VARIANCE) for key in weights)
    model = build_model(encoder, saved.tasks, 0, log_variances=weighed)
    return replace(saved, model=model, encoder=encoder, weights=weights, plan=_plan_of(saved.plan, weights))


def _layout(saved: SavedModel) -> BertLayout:
    """The layout of a model that can be cut; a ModelError says why another cannot."""
    layout = saved.model.layout
    if layout is None:
        raise ModelError(
            f"{saved.encoder.name}: only plain BERT encoders can be cut, without LoRA and adapters; leave out --heads,"
            " --ffn and --layers"
        )
    personal = next((name for name in saved.model.canonical() if saved.plan.level(name) == "client"), None)
    if personal is not None:
        raise ModelError(f"{saved.encoder.name}: `{personal}` stays at the clients; only a whole model can be cut")
    return layout


def _layer(saved: SavedModel, number: int, num_neurons: int, num_heads: int) -> Weights:
    """What is left of a layer, every task's own values included."""
    neurons, columns = kept_neurons(saved, number, num_neurons), kept_columns(saved, number, num_heads)
    left = constants(saved, number, columns)
    found: Weights = {}
    for key, value in saved.weights.items():
        part = key.name.removeprefix(f"encoder.layer.{number}.")
        if part == key.name:
            continue
        if part in NEURON:
            value = value.index_select(NEURON[part], neurons)
        elif part in HEAD:
            value = value.index_select(HEAD[part], columns)
        found[key] = value + left[key].to(value.dtype) if key in left else value
    return found


def kept_neurons(saved: SavedModel, layer: int, count: int) -> Tensor:
    """Which neurons of a layer matter most, in order; tasks that have a layer of their own count together."""
    path = f"encoder.layer.{layer}."
    total: Tensor | None = None
    for task in saved.tasks:
        w_in, w_out = (
            saved.weights[saved.plan.key(path + name, task, "")].double()
            for name in ("intermediate.dense.weight", "output.dense.weight")
        )
        own = torch.linalg.vector_norm(w_in, dim=1) * torch.linalg.vector_norm(w_out, dim=0)
        total = own if total is None else total + own
    assert total is not None
    return torch.argsort(total, descending=True, stable=True)[:count].sort().values


def write_cut(saved: SavedModel, folder: Path) -> CutFolder:
    """Write a cut model, so that a run can start from it: `model.server_model` and `model.start_from`."""
    written = CutFolder(folder / "encoder", folder / "model")
    saved.encoder.module.save_pretrained(written.encoder)
    saved.encoder.tokenizer.save_pretrained(written.encoder)
    config = ModelConfig(max_length=saved.max_length)
    save_model(written.model, saved.encoder, saved.tasks, saved.plan, saved.weights, config)
    return written


def rules_left(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> list[tuple[str, str]]:
    """The sharing rules that still win for some name; a rule for layers that are gone would be an error."""
    remaining, left = list(names), []
    for pattern, level in rules:
        others = [name for name in remaining if not fnmatchcase(name, pattern)]
        if len(others) < len(remaining):
            left.append((pattern, level))
        remaining = others
    return left


def _plan_of(plan: SharingPlan, weights: Weights) -> SharingPlan:
    return replace(plan, rules=tuple(rules_left(plan.rules, dict.fromkeys(key.name for key in weights))))


def _encoder(saved: SavedModel, config: Any, weights: Weights) -> Encoder:
    """The smaller encoder with the first task's values in it."""
    module = build_encoder(config)
    encoder = describe_encoder(module, saved.encoder.tokenizer, saved.encoder.name, saved.encoder.has_pooler)
    task = next(iter(saved.tasks))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[saved.plan.key(name, task, "")])
    return encoder
