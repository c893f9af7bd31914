"""One pass through the encoder: what all of its parts need, and the operations they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.bert_layout import BertLayout
from fedmtl.model.cpu.attention import Places
from fedmtl.model.cpu.gradients import Gradients
from fedmtl.model.cpu.workspace import Workspace
from fedmtl.model.dropout_masks import MaskSource
from fedmtl.model.packing import Packed


@dataclass(frozen=True)
class Pass:
    """Values by canonical name, a batch and where to compute it; `is_kept` where a backward pass follows."""

    values: Mapping[str, Tensor]
    layout: BertLayout
    batch: Packed
    places: Places
    masks: MaskSource
    padding: int | None
    space: Workspace
    gradients: Gradients
    is_kept: bool

    def take(self, name: str, *shape: int) -> Tensor:
        return self.space.take(name, self.values["embeddings.LayerNorm.weight"].dtype, *shape)

    def kept(self, layer: int | str, name: str, *shape: int) -> Tensor:
        """A buffer of this layer's own where a backward pass will read it; otherwise one that all layers share."""
        return self.take(f"{layer}.{name}" if self.is_kept else name, *shape)

    def linear(self, name: str, inputs: Tensor, out: Tensor) -> Tensor:
        return torch.addmm(self.values[f"{name}.bias"], inputs, self.values[f"{name}.weight"].t(), out=out)

    def linear_gradients(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        """Those of the weight and the bias."""
        if self.gradients.wants(f"{name}.weight"):
            torch.mm(gradient.t(), inputs, out=self.gradients.into(f"{name}.weight"))
        if self.gradients.wants(f"{name}.bias"):
            torch.sum(gradient, 0, out=self.gradients.into(f"{name}.bias"))

    def norm(self, name: str, inputs: Tensor) -> Normed:
        weight, bias = self.values[f"{name}.weight"], self.values[f"{name}.bias"]
        out, mean, scale = torch.native_layer_norm(inputs, inputs.shape[-1:], weight, bias, self.layout.epsilon)
        return Normed(name, inputs, out, mean, scale)

    def norm_backward(self, normed: Normed, gradient: Tensor) -> Tensor:
        """The gradient of the norm's inputs, in memory of its own."""
        names = f"{normed.name}.weight", f"{normed.name}.bias"
        by_inputs, by_weight, by_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, normed.inputs, normed.inputs.shape[-1:], normed.mean, normed.scale,
            *(self.values[name] for name in names), [True, *(self.gradients.wants(name) for name in names)],
        )  # fmt: skip
        self.gradients.put(names[0], by_weight)
        self.gradients.put(names[1], by_bias)
        result: Tensor = by_inputs
        return result

    def mask(self, site: str, shape: tuple[int, ...], p: float) -> Tensor | None:
        return self.masks(site, shape, p)


@dataclass(frozen=True)
class Normed:
    """A layer norm's outcome, and what its backward pass needs."""

    name: str
    inputs: Tensor
    out: Tensor
    mean: Tensor
    scale: Tensor
