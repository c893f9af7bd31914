"""How the families of encoders name the parts of a layer: for LoRA, adapters and what `fedmtl prune` removes.

An encoder of a family that is not here is taken for one laid out as BERT, as many are; whoever needs a part looks
whether it is there. docs/encoders.md has what works with which family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

QUERY_KEY_VALUE = ("query", "key", "value")


@dataclass(frozen=True)
class Family:
    """Paths of parts: `layers` in the encoder, the others inside a layer.

    `attention` are its queries, keys and values, three linear layers or one for all. `feed_in` and `feed_out` are the
    feed-forward layers, `feed_width` is the config's key for the neurons between them. A norm takes the sum of what
    its part computes and what entered the part; None where there is no such norm. `cuts` are the options of `fedmtl
    prune` that can take something out of a layer or the stack of them.
    """

    layers: str
    attention: tuple[str, ...]
    attention_out: str
    feed_in: str
    feed_out: str
    attention_norm: str | None
    output_norm: str | None
    feed_width: str = "intermediate_size"
    cuts: tuple[str, ...] = ("heads", "ffn", "layers")

    @property
    def targets(self) -> tuple[str, ...]:
        """The linear layers that LoRA is added to unless the config names others."""
        return (*self.attention, self.feed_in, self.feed_out)


BERT = Family(
    layers="encoder.layer",
    attention=tuple(f"attention.self.{part}" for part in QUERY_KEY_VALUE),
    attention_out="attention.output.dense",
    feed_in="intermediate.dense",
    feed_out="output.dense",
    attention_norm="attention.output.LayerNorm",
    output_norm="output.LayerNorm",
)
# Its layers share a bias by relative position, one for each head: no layer can lose other heads than the next.
MPNET = replace(
    BERT,
    attention=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    cuts=("ffn", "layers"),
)
DISTILBERT = Family(
    layers="transformer.layer",
    attention=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_out="attention.out_lin",
    feed_in="ffn.lin1",
    feed_out="ffn.lin2",
    attention_norm="sa_layer_norm",
    output_norm="output_layer_norm",
    feed_width="hidden_dim",
)
# One layer, or a few, that all numbered layers share.
ALBERT = Family(
    layers="encoder.albert_layer_groups",
    attention=tuple(f"albert_layers.0.attention.{part}" for part in QUERY_KEY_VALUE),
    attention_out="albert_layers.0.attention.dense",
    feed_in="albert_layers.0.ffn",
    feed_out="albert_layers.0.ffn_output",
    attention_norm="albert_layers.0.attention.LayerNorm",
    output_norm="albert_layers.0.full_layer_layer_norm",
    cuts=("ffn", "layers"),
)
# Norms stand before its parts, and its neurons have a gate each.
MODERNBERT = Family(
    layers="layers",
    attention=("attn.Wqkv",),
    attention_out="attn.Wo",
    feed_in="mlp.Wi",
    feed_out="mlp.Wo",
    attention_norm=None,
    output_norm=None,
    cuts=(),
)
FAMILIES = {
    "bert": BERT,
    "roberta": BERT,
    "electra": BERT,
    "mpnet": MPNET,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "modernbert": MODERNBERT,
}
UNKNOWN = replace(BERT, cuts=())


def family_of(config: Any) -> Family:
    """The family of an encoder by its config."""
    return FAMILIES.get(config.model_type, UNKNOWN)


def num_stored_layers(config: Any) -> int:
    """How many layers have weights, which is fewer than all where layers share them."""
    return int(getattr(config, "num_hidden_groups", None) or config.num_hidden_layers)
