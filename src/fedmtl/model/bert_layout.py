"""Whether an encoder is laid out as BERT, so that `fast_bert` may compute it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedmtl.model.bert_values import BertValues
from fedmtl.model.kept_heads import head_size, num_heads

# Imported by whoever built a BertModel; where it is not, there is none.
CODE = "transformers.models.bert.modeling_bert"

LAYER_PARTS = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip


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
    """Whether `fast_bert` computes what a BERT of this config would."""
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
