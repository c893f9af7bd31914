"""Task-specific adapters beside the layers of a shared encoder (Stickland and Murray 2019, "BERT and PALs").

A layer's norm gets one more summand, TS(h), where h is the layer's input. Their equation has h itself as the residual;
their code, and so this file, keeps the encoder's: LN(a + FFN(a) + TS(h)), a being what the attention gives. As in
their code

    low_rank  TS(h) = V_D gelu(V_E h)
    pals      TS(h) = gelu(V_D attention(V_E h)), the attention without a projection behind it

with biases everywhere. They start V_D at random; here it starts at zero, so that the model starts as the plain one.
The wiring `alternative` puts TS(h) beside the self-attention: a = LN(h + MH(h) + TS(h)); see docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmtl.config import AdaptersConfig
from fedmtl.errors import ConfigError
from fedmtl.model.encoder import Encoder
from fedmtl.model.families import FAMILIES, family_of
from fedmtl.seeds import derive_seed

ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


class SmallAttention(nn.Module):
    """Multi-head self-attention that ends with the heads side by side."""

    def __init__(self, size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = mask.bool()[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, seen, dropout)
        return mixed.transpose(1, 2).flatten(2)


class TaskAdapters(nn.Module):
    """One task's adapter, TS, for every layer; `shared` has the parts that its layers share."""

    def __init__(self, config: AdaptersConfig, width: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.kinds = layer_kinds(config, num_layers)
        self.shared, self.layer = nn.ModuleDict(), nn.ModuleList()
        for kind in self.kinds:
            size = config.size_of(kind)
            parts = nn.ModuleDict()
            for name in ("encoder", "attention", "decoder") if kind == "pals" else ("encoder", "decoder"):
                owner = self.shared if is_shared(config, kind, name) else parts
                if name not in owner:
                    owner[name] = _part(name, width, size, config.heads, dropout)
            self.layer.append(parts)

    def forward(self, number: int, hidden: Tensor, mask: Tensor) -> Tensor:
        parts: Any = self.layer[number]
        small = self._of(parts, "encoder")(hidden)
        if self.kinds[number] == "pals":
            return F.gelu(self._of(parts, "decoder")(self._of(parts, "attention")(small, mask)))
        output: Tensor = self._of(parts, "decoder")(F.gelu(small))
        return output

    def _of(self, parts: nn.ModuleDict, name: str) -> nn.Module:
        return parts[name] if name in parts else self.shared[name]


def layer_kinds(config: AdaptersConfig, num_layers: int) -> tuple[str, ...]:
    """What every layer gets; of an odd number of layers, `mixed` gives the middle one pals."""
    if config.kind != "mixed":
        return (config.kind,) * num_layers
    return tuple("pals" if 2 * number < num_layers else "low_rank" for number in range(num_layers))


def is_shared(config: AdaptersConfig, kind: str, part: str) -> bool:
    if config.kind == "mixed":
        return kind == "pals" and part != "attention"
    return config.share == "all" or (config.share == "projections" and part != "attention")


def _part(name: str, width: int, size: int, num_heads: int, dropout: float) -> nn.Module:
    if name == "attention":
        return SmallAttention(size, num_heads, dropout)
    return nn.Linear(width, size) if name == "encoder" else nn.Linear(size, width)


class Adapters(nn.Module):
    """Task -> its adapters, hooked into an encoder's layers; they compute while their task is in use."""

    def __init__(self, encoder: Encoder, config: AdaptersConfig, tasks: Mapping[str, Any], seed: int) -> None:
        super().__init__()
        layers = encoder_layers(encoder, config.wiring)
        # Where the layers are in the encoder, and in each of them the norm that takes the summand.
        self.paths = (family_of(encoder.module.config).layers, norm_path(encoder, config.wiring) or "")
        architecture = encoder.module.config
        dropouts = (getattr(architecture, name, None) for name in ATTENTION_DROPOUTS)
        dropout = float(next((known for known in dropouts if known is not None), 0.0))
        for task in config.tasks or tasks:
            # As in `Heads`, so that a task may have any name.
            self._modules[task] = TaskAdapters(config, encoder.hidden_size, architecture.num_hidden_layers, dropout)
        set_adapters(self, seed)
        self._used: tuple[nn.Module, Tensor] | None = None
        # Of the layer that runs: its number, by calls, since layers may share a module, and what entered it.
        self._number, self._input = -1, torch.empty(0)
        for layer, norm in layers:
            layer.register_forward_pre_hook(self._keep, with_kwargs=True)
            norm.register_forward_pre_hook(self._add)

    @contextmanager
    def used_by(self, task: str, mask: Tensor) -> Iterator[None]:
        """Have one pass of the encoder compute with this task's adapters; a task without any uses the plain encoder."""
        adapters = self._modules.get(task)
        self._used = None if adapters is None else (adapters, mask)
        self._number = -1
        try:
            yield
        finally:
            self._used = None
            self._input = torch.empty(0)

    def _keep(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._used is not None:
            self._number += 1
            self._input = given[0] if given else named["hidden_states"]

    def _add(self, norm: nn.Module, given: tuple[Tensor, ...]) -> Tensor | None:
        if self._used is None:
            return None
        adapters, mask = self._used
        added: Tensor = adapters(self._number, self._input, mask)
        return given[0] + added


def norm_path(encoder: Encoder, wiring: str) -> str | None:
    """The path, inside a layer, of the norm that takes the summand; None where the family has none."""
    family = family_of(encoder.module.config)
    return family.output_norm if wiring == "parallel" else family.attention_norm


def encoder_layers(encoder: Encoder, wiring: str) -> list[tuple[nn.Module, nn.Module]]:
    """Every layer with the norm that takes the summand; one that several numbered layers share comes once."""
    architecture = encoder.module.config
    family, norm = family_of(architecture), norm_path(encoder, wiring)
    try:
        if norm is None or getattr(architecture, "inner_group_num", 1) != 1:
            raise AttributeError
        layers: Any = encoder.module.get_submodule(family.layers)
        return [(layer, layer.get_submodule(norm)) for layer in layers]
    except AttributeError:
        known = ", ".join(name for name, family in FAMILIES.items() if family.output_norm is not None)
        raise ConfigError(
            f"model.adapters: {architecture.model_type} has no norm behind every layer to take them; use another"
            f" encoder ({known})"
        ) from None


def set_adapters(adapters: nn.Module, seed: int) -> None:
    """Decoders and biases start at zero, the rest as a fresh BERT; the bits follow from seed and name alone."""
    with torch.no_grad():
        for name, parameter in adapters.named_parameters():
            if ".decoder." in name or name.endswith(".bias"):
                parameter.zero_()
            else:
                generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
                parameter.normal_(0.0, 0.02, generator=generator)
