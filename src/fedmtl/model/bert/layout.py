"""What the fast paths know of an encoder: whether it is laid out as BERT, and its values without transformers' code.

Values have the names and the order of transformers' BertModel. The fast paths compute with values alone, and importing
the code that computes otherwise takes longer than all else that a run does before its first batch.

An encoder may have fewer attention heads than its width holds. A BertConfig gives every head hidden_size /
num_attention_heads columns. Here that goes on saying how large a head is, and one key more, NUM_HEADS_KEY, how many
are there, the same number in every layer. Queries, keys and values are then narrower than the hidden states.
transformers' BertModel computes such layers, since it counts heads by their size, but does not build them: plain
`from_pretrained` stops at their shapes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from fedmtl.model.tensor_files import load_safetensors

NUM_HEADS_KEY = "attention_heads_kept"
PREFIX = "bert."
POOLER = "pooler."
# Imported by whoever built a BertModel; where it is not, there is none.
CODE = "transformers.models.bert.modeling_bert"
LAYER_PARTS = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip


def num_heads(config: Any) -> int:
    """How many heads every layer has."""
    return int(getattr(config, NUM_HEADS_KEY) if has_fewer_heads(config) else config.num_attention_heads)


def head_size(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def attention_width(config: Any) -> int:
    """How wide queries, keys and values are."""
    return num_heads(config) * head_size(config) if has_fewer_heads(config) else int(config.hidden_size)


def has_fewer_heads(config: Any) -> bool:
    count = getattr(config, NUM_HEADS_KEY, None)
    return config.model_type == "bert" and count is not None and 0 < count < config.num_attention_heads


def keep_heads(config: Any, count: int) -> None:
    """Write into a BERT's config that every layer has so many heads."""
    if count < config.num_attention_heads:
        setattr(config, NUM_HEADS_KEY, count)


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


class BertValues(nn.Module):
    """Holds parameters; `model.bert` computes."""

    def __init__(self, config: Any, with_pooler: bool) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embeddings = _group(
            word_embeddings=_table(config.vocab_size, width, config.pad_token_id),
            position_embeddings=_table(config.max_position_embeddings, width),
            token_type_embeddings=_table(config.type_vocab_size, width),
            LayerNorm=_norm(config),
        )
        self.encoder = _group(layer=nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers)))
        self.pooler = _group(dense=nn.Linear(width, width)) if with_pooler else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        raise AssertionError("these are values only; model.bert computes")

    def get_input_embeddings(self) -> Any:
        return self.embeddings.word_embeddings


def load_bert_values(folder: Path, config: Any) -> BertValues | None:
    """The values in a folder's one file, in float32; None where it does not hold exactly those of a BERT encoder.

    A pooler may be missing; the values of other things than an encoder are left out.
    """
    path = folder / "model.safetensors"
    if config.model_type != "bert" or not path.is_file():
        return None
    found = load_safetensors(path)
    if any(name.startswith(PREFIX) for name in found):
        found = {name.removeprefix(PREFIX): value for name, value in found.items() if name.startswith(PREFIX)}
    with torch.device("meta"):
        module = BertValues(config, any(name.startswith(POOLER) for name in found))
    shapes = {name: value.shape for name, value in module.named_parameters()}
    if shapes != {name: value.shape for name, value in found.items()}:
        return None
    module.load_state_dict({name: value.float() for name, value in found.items()}, assign=True)
    return module


def _layer(config: Any) -> nn.Module:
    width, wide, narrow = config.hidden_size, config.intermediate_size, attention_width(config)
    self_attention = _group(
        query=nn.Linear(width, narrow), key=nn.Linear(width, narrow), value=nn.Linear(width, narrow)
    )
    return _group(
        attention=_group(
            **{"self": self_attention, "output": _group(dense=nn.Linear(narrow, width), LayerNorm=_norm(config))}
        ),
        intermediate=_group(dense=nn.Linear(width, wide)),
        output=_group(dense=nn.Linear(wide, width), LayerNorm=_norm(config)),
    )


def _table(size: int, width: int, padding: int | None = None) -> nn.Embedding:
    # Given its values, it draws none: drawing them where there is no memory for them loads torch's compiler.
    return nn.Embedding(size, width, padding, _weight=torch.empty(size, width))


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _group(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


@dataclass(frozen=True)
class BertLayout:
    """What the computation needs to know besides the values; heads may be fewer than the hidden states hold."""

    num_layers: int
    num_heads: int
    head_size: int
    epsilon: float
    hidden_dropout: float
    attention_dropout: float

    @property
    def attention_width(self) -> int:
        """How wide queries, keys and values are."""
        return self.num_heads * self.head_size


def is_computed(config: Any) -> bool:
    """Whether `model.bert` computes what a BERT of this config would."""
    return config.model_type == "bert" and config.hidden_act == "gelu" and not config.is_decoder


def bert_layout(module: nn.Module) -> BertLayout | None:
    """The layout of a plain BERT encoder; None for any other, and for one with parts added or hooked."""
    # `type`, not isinstance: a subclass may compute something else.
    if type(module) not in (BertValues, getattr(sys.modules.get(CODE), "BertModel", None)):
        return None
    config: Any = module.config
    names = {name for name, _ in module.named_parameters() if not name.startswith("pooler.")}
    is_plain = is_computed(config) and names == _names(config.num_hidden_layers)
    if not is_plain or any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return None
    return BertLayout(
        config.num_hidden_layers,
        num_heads(config),
        head_size(config),
        config.layer_norm_eps,
        config.hidden_dropout_prob,
        config.attention_probs_dropout_prob,
    )


def _names(num_layers: int) -> set[str]:
    tables = {f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}
    modules = [
        "embeddings.LayerNorm",
        *(f"encoder.layer.{n}.{part}" for n in range(num_layers) for part in LAYER_PARTS),
    ]
    return tables | {f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")}
