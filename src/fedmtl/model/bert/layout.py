"""What the fast paths know of an encoder and of a batch.

Values have the names and the order of transformers' BertModel. The fast paths compute with values alone, and importing
the code that computes otherwise takes longer than all else that a run does before its first batch.

An encoder may have fewer attention heads than its width holds, one of another family too. A config gives every head
hidden_size / num_attention_heads columns. Here that goes on saying how large a head is, and one key more,
NUM_HEADS_KEY, how many are there, the same number in every layer. Queries, keys and values are then narrower than the
hidden states. transformers' modules compute such layers, since they count heads by their size, but do not build them:
plain `from_pretrained` stops at their shapes.

A packed batch has all real tokens end to end and says where each one belongs. A dropout mask says what each value is
multiplied by: 0 with probability p and 1 / (1 - p) otherwise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmtl.model.encoder_files import quiet_transformers
from fedmtl.model.families import family_of
from fedmtl.model.tensor_files import load_safetensors

NUM_HEADS_KEY = "attention_heads_kept"
PREFIX = "bert."
POOLER = "pooler."
# A way to pool beside pooler, cls and mean: the states of each text's words, at the first piece of each.
WORDS = "words"
# Those that need the last layer at every position.
EVERYWHERE = ("mean", WORDS)
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
    return "heads" in family_of(config).cuts and count is not None and 0 < count < config.num_attention_heads


def keep_heads(config: Any, count: int) -> None:
    """Write into a config that every layer has so many heads."""
    if count < config.num_attention_heads:
        setattr(config, NUM_HEADS_KEY, count)


def build_encoder(config: Any) -> Any:
    """A module with fresh values in float32, as AutoModel builds it, with as many heads as the config says."""
    module = quiet_transformers().AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if has_fewer_heads(config):
        for layer in module.get_submodule(family_of(config).layers):
            _narrow(layer, config)
    return module


def _narrow(layer: Any, config: Any) -> None:
    """Leave the first heads of a layer."""
    family, count, width = family_of(config), num_heads(config), attention_width(config)
    for path in family.attention:
        part = layer.get_submodule(path)
        part.weight, part.bias = nn.Parameter(part.weight[:width].clone()), nn.Parameter(part.bias[:width].clone())
        part.out_features = width
    out = layer.get_submodule(family.attention_out)
    out.weight, out.in_features = nn.Parameter(out.weight[:, :width].clone()), width
    attention = layer.get_submodule(family.attention[0].rpartition(".")[0])
    for name, value in (("num_attention_heads", count), ("n_heads", count), ("all_head_size", width), ("dim", width)):
        if hasattr(attention, name):
            setattr(attention, name, value)


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


# site, shape, p -> a mask, or None where nothing is dropped.
MaskSource = Callable[[str, tuple[int, ...], float], Tensor | None]


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch that was padded on the right.

    `slots` says which slot of the padded batch, flattened, each token stands in; `sources` says which token fills
    each slot, padding being filled with the first token of its row. `words` are the tokens that a task on words reads.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    mask: Tensor
    firsts: Tensor
    slots: Tensor
    sources: Tensor
    words: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    def pad(self, tokens: Tensor) -> Tensor:
        """(tokens, features) -> (rows, width, features)."""
        return tokens.index_select(0, self.sources).view(self.num_rows, self.width, -1)


def pack(ids: Tensor, mask: Tensor, segments: Tensor, places: Tensor | None = None) -> Packed:
    """Drop the padding on a CPU, where work is proportional to tokens; a GPU would have to wait for the lengths.

    `places` are the slots of the tokens that a task on words reads.
    """
    rows, width = ids.shape
    columns = torch.arange(width, device=ids.device)
    if ids.device.type != "cpu":
        slots = torch.arange(rows * width, device=ids.device)
        firsts = slots[::width].clone()
        return Packed(ids.reshape(-1), segments.reshape(-1), slots % width, mask, firsts, slots, slots, places)
    lengths = mask.sum(1)
    firsts = torch.cumsum(lengths, 0) - lengths
    slots = mask.reshape(-1).nonzero().squeeze(1)
    sources = (firsts[:, None] + columns * mask).reshape(-1)
    words = None if places is None else sources[places]
    ids, segments = ids.reshape(-1)[slots], segments.reshape(-1)[slots]
    return Packed(ids, segments, slots % width, mask, firsts, slots, sources, words)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean state [batch, width] of the real positions of [batch, position, width]."""
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)


def no_masks(site: str, shape: tuple[int, ...], p: float) -> Tensor | None:
    return None


def random_masks(like: Tensor) -> MaskSource:
    """Fresh masks of that tensor's dtype and device; all follow from torch's generator as it is now."""
    if like.device.type != "cpu":
        return lambda site, shape, p: _drawn_by_torch(like, shape, p)
    bits = np.random.SFC64(int(torch.randint(2**62, ()).item()))
    return lambda site, shape, p: _drawn_by_bytes(bits, like.dtype, shape, p)


def _drawn_by_torch(like: Tensor, shape: tuple[int, ...], p: float) -> Tensor | None:
    if not 0.0 < p < 1.0:
        return like.new_zeros(shape) if p >= 1.0 else None
    return like.new_empty(shape).bernoulli_(1.0 - p).div_(1.0 - p)


def _drawn_by_bytes(bits: np.random.SFC64, dtype: torch.dtype, shape: tuple[int, ...], p: float) -> Tensor | None:
    """One random byte per value, which decides unless it equals floor(256 p); those few draw 53 bits more.

    So each value is dropped with probability p exactly, at an eighth of the random bits of one draw each.
    """
    if not 0.0 < p < 1.0:
        return torch.zeros(shape, dtype=dtype) if p >= 1.0 else None
    size = math.prod(shape)
    edge = int(p * 256)
    drawn = bits.random_raw(-(-size // 8)).view(np.uint8)[:size]
    survives = drawn > edge
    undecided = np.flatnonzero(drawn == edge)
    survives[undecided] = np.random.Generator(bits).random(len(undecided)) >= p * 256 - edge
    scaled = np.multiply(survives, 1.0 / (1.0 - p), dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(scaled).view(shape)
