"""The values of a BERT encoder under the names and in the order of transformers' BertModel, without its code.

`fast_bert` computes with values alone, and importing the code that computes otherwise takes longer than all else that a
run does before its first batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.model.kept_heads import attention_width
from fedmtl.model.tensor_files import load_safetensors

PREFIX = "bert."
POOLER = "pooler."


class BertValues(nn.Module):
    """Holds parameters; `fast_bert` computes."""

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
        raise AssertionError("these are values only; fast_bert computes")

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
    own = _group(query=nn.Linear(width, narrow), key=nn.Linear(width, narrow), value=nn.Linear(width, narrow))
    return _group(
        attention=_group(**{"self": own, "output": _group(dense=nn.Linear(narrow, width), LayerNorm=_norm(config))}),
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
