"""BERT encoders with fewer attention heads than their width holds.

A BertConfig gives every head hidden_size / num_attention_heads columns. Here that goes on saying how large a head is,
and one key more, KEPT, how many are there, the same number in every layer. Queries, keys and values are then narrower
than the hidden states. transformers' BertModel computes such layers, since it counts heads by their size, but does not
build them: plain `from_pretrained` stops at their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel

KEPT = "attention_heads_kept"


def num_heads(config: Any) -> int:
    """How many heads every layer has."""
    return int(getattr(config, KEPT) if has_fewer_heads(config) else config.num_attention_heads)


def head_size(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def attention_width(config: Any) -> int:
    """How wide queries, keys and values are."""
    return num_heads(config) * head_size(config) if has_fewer_heads(config) else int(config.hidden_size)


def has_fewer_heads(config: Any) -> bool:
    kept = getattr(config, KEPT, None)
    return config.model_type == "bert" and kept is not None and 0 < kept < config.num_attention_heads


def keep_heads(config: Any, count: int) -> None:
    """Write into a BERT's config that every layer has so many heads."""
    if count < config.num_attention_heads:
        setattr(config, KEPT, count)


def build_encoder(config: Any) -> Any:
    """A module with fresh values in float32, as AutoModel builds it, with as many heads as the config says."""
    module = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if has_fewer_heads(config):
        for layer in module.encoder.layer:
            _narrow(layer.attention, num_heads(config), attention_width(config))
    return module


def _narrow(attention: Any, count: int, width: int) -> None:
    """Leave the first heads of a layer."""
    for part in (attention.self.query, attention.self.key, attention.self.value):
        part.weight, part.bias = nn.Parameter(part.weight[:width].clone()), nn.Parameter(part.bias[:width].clone())
        part.out_features = width
    out = attention.output.dense
    out.weight, out.in_features = nn.Parameter(out.weight[:, :width].clone()), width
    attention.self.num_attention_heads, attention.self.all_head_size = count, width
