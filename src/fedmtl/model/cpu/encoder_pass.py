"""One pass through the encoder: what all of its parts need, and the operations they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.bert_layout import BertLayout
from fedmtl.model.cpu.gradients import Gradients
from fedmtl.model.cpu.native import Kernels
from fedmtl.model.cpu.workspace import Workspace
from fedmtl.model.dropout_masks import MaskSource
from fedmtl.model.packing import Packed


@dataclass(frozen=True)
class Normed:
    """A layer norm's outcome, and what its backward pass needs; `mask` multiplied what was added last."""

    name: str
    inputs: Tensor
    out: Tensor
    moments: tuple[Tensor, ...]
    mask: Tensor | None


@dataclass(frozen=True)
class Pass:
    """Values by canonical name, a batch and where to compute it; `is_kept` where a backward pass follows."""

    values: Mapping[str, Tensor]
    layout: BertLayout
    batch: Packed
    masks: MaskSource
    padding: int | None
    space: Workspace
    gradients: Gradients
    is_kept: bool
    kernels: Kernels | None

    @property
    def dtype(self) -> torch.dtype:
        return self.values["embeddings.LayerNorm.weight"].dtype

    def take(self, name: str, *shape: int) -> Tensor:
        return self.space.take(name, self.dtype, *shape)

    def kept(self, layer: int | str, name: str, *shape: int) -> Tensor:
        """A buffer of this layer's own where a backward pass will read it; otherwise one that all layers share."""
        return self.take(f"{layer}.{name}" if self.is_kept else name, *shape)

    def linear(self, weight: Tensor, bias: Tensor, inputs: Tensor, out: Tensor) -> Tensor:
        if self.kernels and self.kernels.fits(*weight.shape):
            packed = self.take("packed", weight.numel())
            self.kernels.call("linear", len(inputs), *weight.shape, inputs, weight, bias, packed, out)
            return out
        return torch.addmm(bias, inputs, weight.t(), out=out)

    def linear_by_name(self, name: str, inputs: Tensor, out: Tensor) -> Tensor:
        return self.linear(self.values[f"{name}.weight"], self.values[f"{name}.bias"], inputs, out)

    def by_inputs(self, weight: Tensor, gradient: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
        """The gradient of a linear map's inputs, or that added to what is there."""
        if self.kernels and self.kernels.fits(*weight.shape):
            self.kernels.call("linear_inputs", len(gradient), *weight.shape, gradient, weight, out, int(adds))
            return out
        return out.addmm_(gradient, weight) if adds else torch.mm(gradient, weight, out=out)

    def by_weight(self, inputs: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        if self.kernels and self.kernels.fits(*out.shape):
            self.kernels.call("linear_values", len(inputs), *out.shape, gradient, inputs, out)
            return out
        return torch.mm(gradient.t(), inputs, out=out)

    def linear_gradients(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        """Those of the weight and the bias."""
        if self.gradients.wants(f"{name}.weight"):
            self.by_weight(inputs, gradient, self.gradients.into(f"{name}.weight"))
        if self.gradients.wants(f"{name}.bias"):
            torch.sum(gradient, 0, out=self.gradients.into(f"{name}.bias"))

    def add_norm(
        self, layer: int | str, name: str, added: Tensor, hidden: Tensor | None, mask: Tensor | None
    ) -> Normed:
        """The norm of `hidden` and of `added` under the mask; `added` becomes their sum."""
        rows, width = added.shape
        weight, bias = self.values[f"{name}.weight"], self.values[f"{name}.bias"]
        if self.kernels:
            out, moments = self.kept(layer, f"{name}.out", rows, width), self.kept(layer, f"{name}.moments", rows, 2)
            self.kernels.call(
                "add_norm", rows, width, added, hidden, mask, weight, bias, self.layout.epsilon, out, moments
            )
            return Normed(name, added, out, (moments,), mask)
        if hidden is not None:
            added = added.add_(hidden) if mask is None else torch.addcmul(hidden, added, mask, out=added)
        out, *parts = torch.native_layer_norm(added, (width,), weight, bias, self.layout.epsilon)
        return Normed(name, added, out, tuple(parts), mask)

    def norm_backward(self, normed: Normed, gradient: Tensor, buffer: str) -> tuple[Tensor, Tensor]:
        """The gradients of the norm's inputs, in a buffer of that name, and of what was under the mask."""
        rows, width = gradient.shape
        names = f"{normed.name}.weight", f"{normed.name}.bias"
        masked = None if normed.mask is None else self.take("by_added", rows, width)
        if self.kernels:
            by_sum = self.take(buffer, rows, width)
            by_values = self.take("by_norm", 2, width)
            self.kernels.call(
                "norm_backward", rows, width, gradient, normed.inputs, *normed.moments, self.values[names[0]],
                normed.mask, by_sum, masked, by_values[0], by_values[1],
            )  # fmt: skip
            parts: tuple[Tensor | None, ...] = (by_values[0], by_values[1])
        else:
            by_sum, *parts = torch.ops.aten.native_layer_norm_backward(
                gradient, normed.inputs, (width,), *normed.moments, *(self.values[name] for name in names),
                [True, *(self.gradients.wants(name) for name in names)],
            )  # fmt: skip
            if masked is not None and normed.mask is not None:
                torch.mul(by_sum, normed.mask, out=masked)
        for name, part in zip(names, parts, strict=True):
            self.gradients.put(name, part)
        return by_sum, by_sum if masked is None else masked
