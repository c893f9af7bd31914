"""Pruning a finished run: the config of a run that goes on from it, with weights taken out of its model.

Single weights go round by round while the new run trains. Attention heads, feed-forward neurons and whole layers leave
the encoder before it (structured pruning). Without neurons or layers it stays what it was, only smaller; one with fewer
heads is loaded by `model/encoder.py`. `model/families.py` says what can leave which family. None of this needs text,
which a server does not have.

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
from fedmtl.model.bert.layout import build_encoder, head_size, keep_heads, num_heads
from fedmtl.model.encoder import Encoder, describe_encoder
from fedmtl.model.families import Family, family_of, num_stored_layers
from fedmtl.model.multitask import build_model
from fedmtl.model.saved import SavedModel, load_model, save_model
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import LOG_VARIANCE, Key, SharingPlan, Weights
from fedmtl.sharing.weights import count_parameters
from fedmtl.tasks.pretrained_head import written_out


@dataclass(frozen=True)
class Parts:
    """What can leave a layer of an encoder: parts of its values, each with the dimension that counts what leaves."""

    heads: dict[str, int]
    neurons: dict[str, int]


def parts_of(family: Family) -> Parts:
    """A head is rows of queries, keys and values and columns of the output; a neuron a row in, and a column out."""
    rows = {f"{part}.{leaf}": 0 for part in family.attention for leaf in ("weight", "bias")}
    neurons = {f"{family.feed_in}.{leaf}": 0 for leaf in ("weight", "bias")}
    return Parts({**rows, f"{family.attention_out}.weight": 1}, {**neurons, f"{family.feed_out}.weight": 1})


def remaining_columns(saved: SavedModel, layer: int, count: int) -> Tensor:
    """The columns of the heads that matter most, in order; tasks that have separate layers count together."""
    config = saved.encoder.module.config
    family, total_heads, size = family_of(config), num_heads(config), head_size(config)
    total = torch.zeros(total_heads, dtype=torch.float64)
    for task in saved.tasks:
        parts = (family.attention[2], family.attention_out)
        value, out = (_value(saved, layer, f"{part}.weight", task).double() for part in parts)
        maps = out.view(len(out), total_heads, size).transpose(0, 1) @ value.view(total_heads, size, -1)
        total += torch.linalg.matrix_norm(maps)
    heads = torch.argsort(total, descending=True, stable=True)[:count].sort().values
    return (heads[:, None] * size + torch.arange(size)).view(-1)


def constants(saved: SavedModel, layer: int, columns: Tensor) -> dict[Key, Tensor]:
    """What the removed heads add to the output's bias, by its key: the mean over the tasks that share the bias."""
    family = family_of(saved.encoder.module.config)
    found: dict[Key, list[Tensor]] = {}
    for task in saved.tasks:
        out = _value(saved, layer, f"{family.attention_out}.weight", task)
        bias = _value(saved, layer, f"{family.attention[2]}.bias", task)
        gone = torch.ones(len(bias), dtype=torch.bool)
        gone[columns] = False
        constant = out[:, gone].double() @ bias[gone].double()
        key = saved.plan.key(f"{family.layers}.{layer}.{family.attention_out}.bias", task, "")
        found.setdefault(key, []).append(constant)
    return {key: torch.stack(parts).mean(0) for key, parts in found.items()}


def _value(saved: SavedModel, layer: int, part: str, task: str) -> Tensor:
    layers = family_of(saved.encoder.module.config).layers
    return saved.weights[saved.plan.key(f"{layers}.{layer}.{part}", task, "")]


@dataclass(frozen=True)
class CutFolder:
    """Where a cut model lies: its encoder, and the model with the tasks' heads."""

    encoder: Path
    model: Path


def cut(saved: SavedModel, ffn: float, layers: int, heads: float = 0.0) -> SavedModel:
    """The model without that share of each layer's feed-forward neurons and attention heads, and its topmost layers."""
    config = type(saved.encoder.module.config).from_dict(saved.encoder.module.config.to_dict())
    family = _family(saved, Cut(ffn=ffn, layers=layers, heads=heads))
    if layers >= config.num_hidden_layers:
        raise ModelError(
            f"--layers: found {layers}, but the encoder has {config.num_hidden_layers}; leave one at least"
        )
    config.num_hidden_layers -= layers
    neurons = getattr(config, family.feed_width)
    num_neurons = neurons - round(ffn * neurons)
    if num_neurons < 1:
        raise ModelError(f"--ffn: found {ffn:g}, which leaves no neuron; write a smaller share")
    setattr(config, family.feed_width, num_neurons)
    before = num_heads(config)
    after = before - round(heads * before)
    if after < 1 or (heads and after == before):
        raise ModelError(
            f"--heads: found {heads:g}, which {'takes' if after else 'leaves'} none of {before} heads;"
            f" write a {'larger' if after else 'smaller'} share"
        )
    keep_heads(config, after)
    path = f"{family.layers}."
    weights: Weights = {key: value for key, value in saved.weights.items() if not key.name.startswith(path)}
    for number in range(num_stored_layers(config)):
        weights |= _layer(saved, number, num_neurons, after)
    weights = {key: weights[key] for key in saved.weights if key in weights}
    encoder = _encoder(saved, config, weights)
    weighed = any(key.name.endswith(LOG_VARIANCE) for key in weights)
    model = build_model(encoder, saved.tasks, 0, log_variances=weighed)
    return replace(saved, model=model, encoder=encoder, weights=weights, plan=_plan_of(saved.plan, weights))


def _family(saved: SavedModel, wanted: Cut) -> Family:
    """The family of a model that can be cut so; a ModelError says why another cannot."""
    config = saved.encoder.module.config
    family = family_of(config)
    if saved.model.lora is not None or saved.model.adapters is not None:
        raise ModelError(
            f"{saved.encoder.name}: an encoder with LoRA or adapters cannot be cut; leave out --heads, --ffn and"
            " --layers"
        )
    for option in ("heads", "ffn", "layers"):
        if getattr(wanted, option) and option not in family.cuts:
            able = " and ".join(f"--{name}" for name in family.cuts) or "--amount alone"
            raise ModelError(f"--{option}: cannot be taken out of {config.model_type} encoders; they allow {able}")
    if wanted.layers and getattr(config, "num_hidden_groups", 1) > 1:
        raise ModelError(f"--layers: the layers of {saved.encoder.name} share weights in groups; leave it out")
    _check_whole(saved, saved.encoder.name)
    return family


def _check_whole(saved: SavedModel, name: str) -> None:
    personal = next((name for name in saved.model.canonical() if saved.plan.level(name) == "client"), None)
    if personal is not None:
        raise ModelError(
            f"{name}: `{personal}` stayed at the clients, so there is no whole model to prune; train with it at level"
            " task (sharing.rules) and prune that run, or prune while training, with training.pruning.amount=0.2"
        )


def _layer(saved: SavedModel, number: int, num_neurons: int, num_left: int) -> Weights:
    """What is left of a layer, for every task that has a separate one."""
    config = saved.encoder.module.config
    family = family_of(config)
    parts = parts_of(family)
    taken = {part: (dim, remaining_neurons(saved, number, num_neurons)) for part, dim in parts.neurons.items()}
    left: dict[Key, Tensor] = {}
    if num_left < num_heads(config):
        columns = remaining_columns(saved, number, num_left)
        left = constants(saved, number, columns)
        taken |= {part: (dim, columns) for part, dim in parts.heads.items()}
    found: Weights = {}
    for key, value in saved.weights.items():
        part = key.name.removeprefix(f"{family.layers}.{number}.")
        if part == key.name:
            continue
        if part in taken:
            value = value.index_select(*taken[part])
        found[key] = value + left[key].to(value.dtype) if key in left else value
    return found


def remaining_neurons(saved: SavedModel, layer: int, count: int) -> Tensor:
    """Which neurons of a layer matter most, in order; tasks that have separate layers count together."""
    family = family_of(saved.encoder.module.config)
    total: Tensor | None = None
    for task in saved.tasks:
        w_in, w_out = (
            _value(saved, layer, f"{part}.weight", task).double() for part in (family.feed_in, family.feed_out)
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
    _check_whole(saved, run.name)
    size = count_parameters(saved.weights)
    if not wanted.removes:
        config = _config(run, wanted, epochs, overrides, None, saved)
        return Pruned(config, (size, size))
    smaller = cut(saved, wanted.ffn, wanted.layers, wanted.heads)
    name = f"ffn{wanted.ffn:g}-layers{wanted.layers}" + (f"-heads{wanted.heads:g}" if wanted.heads else "")
    if run.model_folder is not None:
        name = f"{run.model_folder.name}-{name}"
    folder = run.path / "cut" / name
    config = _config(run, wanted, epochs, overrides, write_cut(smaller, folder.absolute()), smaller)
    return Pruned(config, (size, count_parameters(smaller.weights)))


def _config(
    run: RunFolder, wanted: Cut, epochs: int, overrides: Sequence[str], folder: CutFolder | None, saved: SavedModel
) -> Config:
    """The run's config with one epoch a round; pruning begins at once and ends a round before the last."""
    raw = load_config(run.config).model_dump()
    raw["output"] = str(run.path.parent)
    for name, task in raw["tasks"].items():
        if task["head"] == "pretrained":
            task |= written_out(saved.tasks[name])
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
