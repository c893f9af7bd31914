"""Pruning a finished run: the config of a run that goes on from it, with weights taken out of its model.

Single weights go round by round while the new run trains. Attention heads, feed-forward neurons and whole layers leave
the BERT before it (structured pruning). Without neurons or layers it stays a plain BERT, only smaller; one with fewer
heads is loaded by `model/bert/layout.py`. None of this needs text, which a server does not have.

Neurons go by the product of what leads in and what leads out, |W_in| |W_out|, as many in every layer, since a config
has one `intermediate_size`. Layers go from the top (Sajjad et al. 2020, On the Effect of Dropping Layers of Pre-trained
Transformer Models).

A head reads a mean of the hidden states through W_v and writes it through W_o; queries and keys only say which mean.
So heads go by |W_o W_v|, the Frobenius norm of the whole map (the OV circuit of Elhage et al. 2021, A Mathematical
Framework for Transformer Circuits), as many in every layer. With text, the gradients of Michel et al. 2019, Are Sixteen
Heads Really Better than One?, say more. The shares of a mean add up to 1, so the value's bias comes out as the constant
W_o b_v. A head that goes leaves it in the bias of the output: with |W_o W_v| = 0, answers stay what they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.compress.cut import Cut
from fedmtl.config import Config, ModelConfig
from fedmtl.config.file import config_from, load_config, with_overrides
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.bert.layout import BertLayout, build_encoder, keep_heads
from fedmtl.model.encoder import Encoder, describe_encoder
from fedmtl.model.multitask import build_model
from fedmtl.model.saved import SavedModel, load_model, save_model
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import LOG_VARIANCE, Key, SharingPlan, Weights
from fedmtl.sharing.weights import count_parameters

VALUE, OUT = "attention.self.value", "attention.output.dense"
# What a head is made of: the part of a layer's values, and their dimension that counts the heads' columns.
HEAD = {
    **{f"attention.self.{part}.{leaf}": 0 for part in ("query", "key", "value") for leaf in ("weight", "bias")},
    f"{OUT}.weight": 1,
}
LAYER = re.compile(r"encoder\.layer\.\d+\..*")
# What a neuron is made of: the part of a layer's values, and their dimension that counts neurons.
NEURON = {"intermediate.dense.weight": 0, "intermediate.dense.bias": 0, "output.dense.weight": 1}


def remaining_columns(saved: SavedModel, layer: int, count: int) -> Tensor:
    """The columns of the heads that matter most, in order; tasks that have separate layers count together."""
    assert saved.model.layout is not None
    num_heads, size = saved.model.layout.num_heads, saved.model.layout.head_size
    total = torch.zeros(num_heads, dtype=torch.float64)
    for task in saved.tasks:
        value, out = (_value(saved, layer, f"{part}.weight", task).double() for part in (VALUE, OUT))
        maps = out.view(len(out), num_heads, size).transpose(0, 1) @ value.view(num_heads, size, -1)
        total += torch.linalg.matrix_norm(maps)
    heads = torch.argsort(total, descending=True, stable=True)[:count].sort().values
    return (heads[:, None] * size + torch.arange(size)).view(-1)


def constants(saved: SavedModel, layer: int, columns: Tensor) -> dict[Key, Tensor]:
    """What the removed heads add to the output's bias, by its key: the mean over the tasks that share the bias."""
    assert saved.model.layout is not None
    if len(columns) == saved.model.layout.attention_width:
        return {}
    found: dict[Key, list[Tensor]] = {}
    for task in saved.tasks:
        out, bias = _value(saved, layer, f"{OUT}.weight", task), _value(saved, layer, f"{VALUE}.bias", task)
        gone = torch.ones(len(bias), dtype=torch.bool)
        gone[columns] = False
        constant = out[:, gone].double() @ bias[gone].double()
        found.setdefault(saved.plan.key(f"encoder.layer.{layer}.{OUT}.bias", task, ""), []).append(constant)
    return {key: torch.stack(parts).mean(0) for key, parts in found.items()}


def _value(saved: SavedModel, layer: int, part: str, task: str) -> Tensor:
    return saved.weights[saved.plan.key(f"encoder.layer.{layer}.{part}", task, "")]


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
    """What is left of a layer, for every task that has a separate one."""
    neurons, columns = remaining_neurons(saved, number, num_neurons), remaining_columns(saved, number, num_heads)
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


def remaining_neurons(saved: SavedModel, layer: int, count: int) -> Tensor:
    """Which neurons of a layer matter most, in order; tasks that have separate layers count together."""
    path = f"encoder.layer.{layer}."
    total: Tensor | None = None
    for task in saved.tasks:
        w_in, w_out = (
            saved.weights[saved.plan.key(path + name, task, "")].double()
            for name in ("intermediate.dense.weight", "output.dense.weight")
        )
        importance = torch.linalg.vector_norm(w_in, dim=1) * torch.linalg.vector_norm(w_out, dim=0)
        total = importance if total is None else total + importance
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


@dataclass(frozen=True)
class Pruned:
    """The config to run, and the model's parameters before and after what was cut."""

    config: Config
    parameters: tuple[int, int]


def prune_run(run: RunFolder, wanted: Cut, epochs: int, overrides: Sequence[str] = ()) -> Pruned:
    """Prepare a run of so many epochs that starts with the pruned model of another; a cut model is written into it."""
    if not wanted.amount and not wanted.removes:
        raise ConfigError("prune: nothing to take out; write --amount 0.2, --heads 0.5, --ffn 0.25 or --layers 2")
    for name in ("amount", "ffn", "heads"):
        if not 0 <= getattr(wanted, name) < 1:
            raise ConfigError(f"--{name}: found {getattr(wanted, name):g}, it must be at least 0 and less than 1")
    saved = load_model(run.model)
    size = count_parameters(saved.weights)
    if not wanted.removes:
        config = _config(run, wanted, epochs, overrides, None, saved)
        return Pruned(config, (size, size))
    smaller = cut(saved, wanted.ffn, wanted.layers, wanted.heads)
    name = f"ffn{wanted.ffn:g}-layers{wanted.layers}" + (f"-heads{wanted.heads:g}" if wanted.heads else "")
    folder = run.path / "cut" / name
    config = _config(run, wanted, epochs, overrides, write_cut(smaller, folder.absolute()), smaller)
    return Pruned(config, (size, count_parameters(smaller.weights)))


def _config(
    run: RunFolder, wanted: Cut, epochs: int, overrides: Sequence[str], folder: CutFolder | None, saved: SavedModel
) -> Config:
    """The run's config with one epoch a round; pruning begins at once and ends a round before the last."""
    raw = load_config(run.config).model_dump()
    raw["output"] = str(run.path.parent)
    raw["model"]["start_from"] = str(run.model.absolute())
    training = raw["training"]
    training |= {"num_rounds": epochs, "local_epochs": 1, "local_steps": None, "pruning": None}
    training["warmup_rounds"] = min(training["warmup_rounds"], epochs)
    if wanted.amount:
        training["pruning"] = {"amount": wanted.amount, "rounds": max(1, epochs), "start_round": 0}
    if folder is not None:
        model = {"server_model": str(folder.encoder), "client_model": None, "initial": "pretrained"}
        raw["model"] |= {**model, "start_from": str(folder.model)}
        names = dict.fromkeys(key.name for key in saved.weights)
        rules = [next(iter(rule.items())) for rule in raw["sharing"]["rules"]]
        raw["sharing"]["rules"] = [{pattern: level} for pattern, level in rules_left(rules, names)]
    raw = with_overrides(raw, overrides)
    if wanted.amount and isinstance(raw["training"]["pruning"], dict):
        # A section that was replaced as a whole has lost it.
        raw["training"]["pruning"]["amount"] = wanted.amount
    return config_from(raw)
