"""One layer at every position, forward and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedmtl.model.cpu.attention import Attended, Attention
from fedmtl.model.cpu.encoder_pass import Pass
from fedmtl.model.cpu.feed_forward import Fed, feed_forward, feed_forward_backward

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Layer:
    """What the backward pass needs; `weight` is that of queries, keys and values as one."""

    number: int
    hidden: Tensor
    weight: Tensor
    attended: Attended
    fed: Fed

    @property
    def out(self) -> Tensor:
        return self.fed.last.out


def layer_forward(run: Pass, attention: Attention, number: int, hidden: Tensor) -> Layer:
    """Tokens in, tokens out."""
    width, narrow = hidden.shape[1], run.layout.attention_width
    names = [f"encoder.layer.{number}.attention.self.{part}" for part in PARTS]
    weight = run.kept(number, "joint_weight", 3 * narrow, width)
    torch.cat([run.values[f"{name}.weight"] for name in names], out=weight)
    bias = torch.cat([run.values[f"{name}.bias"] for name in names])
    joint = run.linear(weight, bias, hidden, run.kept(number, "joint", len(hidden), 3 * narrow))
    shape = (run.batch.num_rows * attention.num_heads, attention.width, attention.width)
    mask = run.masks(f"{number}.attention", shape, run.layout.attention_dropout)
    mixed, attended = attention.forward(joint, mask, run.take, partial(run.kept, number))
    return Layer(number, hidden, weight, attended, feed_forward(run, number, hidden, mixed))


def layer_backward(run: Pass, attention: Attention, layer: Layer, gradient: Tensor) -> Tensor:
    by_hidden, by_mixed = feed_forward_backward(run, layer.number, layer.fed, gradient)
    by_joint = attention.backward(layer.attended, by_mixed, run.take)
    by_weight = run.by_weight(layer.hidden, by_joint, run.take("by_joint_weight", *layer.weight.shape))
    by_bias = by_joint.sum(0)
    for part, weight, bias in zip(PARTS, by_weight.chunk(3), by_bias.chunk(3), strict=True):
        name = f"encoder.layer.{layer.number}.attention.self.{part}"
        run.gradients.put(f"{name}.weight", weight)
        run.gradients.put(f"{name}.bias", bias)
    return run.by_inputs(layer.weight, by_joint, by_hidden, adds=True)
