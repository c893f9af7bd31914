"""One pass through the encoder: what all of its parts need, and the operations they share.

These are memory that the next pass uses again, the tensors that gradients are written into, products and norms by
compiled kernels (kernels.c) or by torch where this machine has none, and the part of a layer after the attention.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedmtl.model.bert.layout import BertLayout, MaskSource, Packed

LIBRARY = Path(__file__).with_name("_kernels.so")

# The token table.
WORDS = "embeddings.word_embeddings.weight"

SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}

# What each takes: n a whole number, p an address, r a real number.
SIGNATURES = {
    "linear": "nnnppppp",
    "linear_inputs": "nnnpppn",
    "linear_values": "nnnppp",
    "attend": "nnnnpppppp",
    "attend_backward": "nnnnppppppp",
    "first_attend": "nnnn" + 14 * "p",
    "first_attend_backward": "nnnn" + 22 * "p",
    "add_norm": "nnpppppr" + "pp",
    "norm_backward": "nn" + 9 * "p",
    "linear_squares": "nnnppppnpp",
    "table_squares": "nnpppppnppp",
    "owner_sums": "nn" + 7 * "p",
}


@cache
def load(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """The library, or None where there is none, or none that this CPU can run."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return library if library.is_supported() else None


class Kernels:
    """The kernels for one dtype; all tensors are contiguous and on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        # Two vectors of 64 bytes.
        self.block = 128 // dtype.itemsize
        kinds = {"n": ctypes.c_ssize_t, "p": ctypes.c_void_p, "r": ctypes.c_float}
        if dtype == torch.float64:
            kinds["r"] = ctypes.c_double
        self._functions = {}
        for name, signature in SIGNATURES.items():
            function = getattr(library, f"{name}_{SUFFIXES[dtype]}")
            function.argtypes, function.restype = [kinds[kind] for kind in signature], None
            self._functions[name] = function

    def fits(self, *sizes: int) -> bool:
        """Whether products may have these numbers of columns."""
        return all(size % self.block == 0 for size in sizes)

    def call(self, name: str, *arguments: int | float | Tensor | None) -> None:
        """Tensors go as their addresses."""
        self._functions[name](*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    library = load()
    return None if library is None else Kernels(library, dtype)


def kernels(dtype: torch.dtype) -> Kernels | None:
    """Kernels of one thread, where torch may use no more either: with several, torch's operations are faster."""
    return _kernels(dtype) if dtype in SUFFIXES and torch.get_num_threads() == 1 else None


def kernels_here() -> str:
    """Which operations a client's training on a CPU uses: `compiled`, or `torch` where nothing was compiled."""
    return "torch" if _kernels(torch.float32) is None else "compiled"


class Gradients:
    """Gives a tensor to write each wanted gradient into: its entry of `targets` where there is one, or a fresh one."""

    def __init__(self, wanted: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        self._wanted, self._targets = wanted, targets
        self.fresh: dict[str, Tensor] = {}

    def fresh_in_order(self) -> list[Tensor | None]:
        """Return the wanted gradients that have no target, None where nothing wrote one."""
        return [self.fresh.get(name) for name in self._wanted if name not in self._targets]

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def wants_any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._wanted)

    def into(self, name: str) -> Tensor:
        """Return the tensor for a value's gradient, which is to be overwritten, not added to."""
        if name in self._targets:
            return self._targets[name]
        self.fresh[name] = torch.empty_like(self._wanted[name], requires_grad=False)
        return self.fresh[name]

    def put(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and self.wants(name):
            self.into(name).copy_(gradient.view(self._wanted[name].shape))


class Workspace:
    """Named buffers that only grow; what is in one is valid until its name is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor of that shape with arbitrary content."""
        size = math.prod(shape)
        known = self._buffers.get(name)
        if known is None or known.numel() < size or known.dtype != dtype:
            # Batches differ a little in size: some spare memory saves the next one a new buffer. What is made while
            # scoring must serve training too, which an inference tensor may not.
            with torch.inference_mode(False):
                self._buffers[name] = known = torch.empty(size + size // 8, dtype=dtype)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return known.as_strided(shape, strides)


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
    """Weights by canonical name, a batch and where to compute it; `needs_backward`: a backward pass follows."""

    weights: Mapping[str, Tensor]
    layout: BertLayout
    batch: Packed
    masks: MaskSource
    padding: int | None
    space: Workspace
    gradients: Gradients
    needs_backward: bool
    kernels: Kernels | None

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["embeddings.LayerNorm.weight"].dtype

    def take(self, name: str, *shape: int) -> Tensor:
        return self.space.take(name, self.dtype, *shape)

    def take_saved(self, layer: int | str, name: str, *shape: int) -> Tensor:
        """Return a buffer for this layer alone if a backward pass will read it, otherwise one that all layers share."""
        return self.take(f"{layer}.{name}" if self.needs_backward else name, *shape)

    def linear(self, weight: Tensor, bias: Tensor, inputs: Tensor, out: Tensor) -> Tensor:
        if self.kernels and self.kernels.fits(*weight.shape):
            packed = self.take("packed", weight.numel())
            self.kernels.call("linear", len(inputs), *weight.shape, inputs, weight, bias, packed, out)
            return out
        return torch.addmm(bias, inputs, weight.t(), out=out)

    def linear_by_name(self, name: str, inputs: Tensor, out: Tensor) -> Tensor:
        return self.linear(self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], inputs, out)

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
        """Write those of the weight and the bias."""
        if self.gradients.wants(f"{name}.weight"):
            self.by_weight(inputs, gradient, self.gradients.into(f"{name}.weight"))
        if self.gradients.wants(f"{name}.bias"):
            torch.sum(gradient, 0, out=self.gradients.into(f"{name}.bias"))

    def joint_gradients(self, names: Sequence[str], inputs: Tensor, gradient: Tensor) -> None:
        """Write those of linear layers with the same inputs, whose output gradients stand side by side."""
        shape = gradient.shape[1], inputs.shape[1]
        by_weight = self.by_weight(inputs, gradient, self.take("by_joint_weight", *shape)).chunk(len(names))
        for name, weight, bias in zip(names, by_weight, gradient.sum(0).chunk(len(names)), strict=True):
            self.gradients.put(f"{name}.weight", weight)
            self.gradients.put(f"{name}.bias", bias)

    def head_gradients(self, name: str, inputs: Tensor, gradient: Tensor, totals: Tensor) -> None:
        """Write those of a linear layer in which each head has inputs: (rows, heads, ...); the bias had `totals`."""
        if self.gradients.wants(f"{name}.weight"):
            by_weight = torch.bmm(gradient.permute(1, 2, 0), inputs.transpose(0, 1))
            self.gradients.put(f"{name}.weight", by_weight)
        self.gradients.put(f"{name}.bias", (gradient * totals).sum(0))

    def writable(self, name: str) -> Tensor:
        """Where a kernel writes the gradient of a value, wanted or not."""
        if self.gradients.wants(name):
            return self.gradients.into(name)
        return self.take(f"by_{name}", *self.weights[name].shape)

    def made_head_gradients(self, name: str, inputs: Tensor, gradient: Tensor, totals: Tensor) -> None:
        """Note that a kernel wrote what `head_gradients` would have written."""

    def norm_gradients(self, normed: Normed, gradient: Tensor, parts: Sequence[Tensor | None]) -> None:
        """Write those of a layer norm's weight and bias, which are given."""
        for leaf, part in zip(("weight", "bias"), parts, strict=True):
            self.gradients.put(f"{normed.name}.{leaf}", part)

    def table_gradients(self, indices: Mapping[str, Tensor], gradient: Tensor) -> None:
        """Write those of the tables, by name, whose rows were added up."""
        for name, index in indices.items():
            if self.gradients.wants(name):
                table = self.gradients.into(name).zero_().index_add_(0, index, gradient)
                if name == WORDS and self.padding is not None:
                    table[self.padding] = 0.0

    def add_norm(
        self, layer: int | str, name: str, added: Tensor, hidden: Tensor | None, mask: Tensor | None
    ) -> Normed:
        """The norm of `hidden` and of `added` under the mask; `added` becomes their sum."""
        rows, width = added.shape
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        if self.kernels:
            out, moments = (
                self.take_saved(layer, f"{name}.out", rows, width),
                self.take_saved(layer, f"{name}.moments", rows, 2),
            )
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
                "norm_backward", rows, width, gradient, normed.inputs, *normed.moments, self.weights[names[0]],
                normed.mask, by_sum, masked, by_values[0], by_values[1],
            )  # fmt: skip
            parts: tuple[Tensor | None, ...] = (by_values[0], by_values[1])
        else:
            by_sum, *parts = torch.ops.aten.native_layer_norm_backward(
                gradient, normed.inputs, (width,), *normed.moments, *(self.weights[name] for name in names),
                [True, *(self.gradients.wants(name) for name in names)],
            )  # fmt: skip
            if masked is not None and normed.mask is not None:
                torch.mul(by_sum, normed.mask, out=masked)
        self.norm_gradients(normed, gradient, parts)
        return by_sum, by_sum if masked is None else masked


@dataclass(frozen=True)
class Fed:
    """What the backward pass needs."""

    mixed: Tensor
    middle: Normed
    before: Tensor
    inner: Tensor
    last: Normed


def feed_forward(run: Pass, number: int, hidden: Tensor, mixed: Tensor) -> Fed:
    """`last.out` is the layer's outcome for the positions whose states and mixed values are given."""
    name, p, shape = f"encoder.layer.{number}", run.layout.hidden_dropout, tuple(hidden.shape)
    added = run.linear_by_name(f"{name}.attention.output.dense", mixed, run.take_saved(number, "added", *shape))
    mask = run.masks(f"{number}.attention.output", shape, p)
    middle = run.add_norm(number, f"{name}.attention.output.LayerNorm", added, hidden, mask)
    wide = len(hidden), len(run.weights[f"{name}.intermediate.dense.bias"])
    before = run.linear_by_name(f"{name}.intermediate.dense", middle.out, run.take_saved(number, "before", *wide))
    inner = torch.ops.aten.gelu.out(before, out=run.take_saved(number, "inner", *wide))
    outer = run.linear_by_name(f"{name}.output.dense", inner, run.take_saved(number, "outer", *shape))
    mask = run.masks(f"{number}.output", shape, p)
    last = run.add_norm(number, f"{name}.output.LayerNorm", outer, middle.out, mask)
    return Fed(mixed, middle, before, inner, last)


def feed_forward_backward(run: Pass, number: int, fed: Fed, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `hidden` and of `mixed`; the latter has one row more, which is zero."""
    name = f"encoder.layer.{number}"
    rows = len(gradient)
    by_sum, by_outer = run.norm_backward(fed.last, gradient, "by_last")
    run.linear_gradients(f"{name}.output.dense", fed.inner, by_outer)
    by_inner = run.take("by_inner", *fed.inner.shape)
    run.by_inputs(run.weights[f"{name}.output.dense.weight"], by_outer, by_inner)
    torch.ops.aten.gelu_backward.grad_input(by_inner, fed.before, grad_input=by_inner)
    run.linear_gradients(f"{name}.intermediate.dense", fed.middle.out, by_inner)
    run.by_inputs(run.weights[f"{name}.intermediate.dense.weight"], by_inner, by_sum, adds=True)
    by_sum, by_added = run.norm_backward(fed.middle, by_sum, "by_middle")
    run.linear_gradients(f"{name}.attention.output.dense", fed.mixed, by_added)
    by_mixed = run.take("by_mixed", rows + 1, run.layout.attention_width)
    run.by_inputs(run.weights[f"{name}.attention.output.dense.weight"], by_added, by_mixed[:rows])
    by_mixed[rows:].zero_()
    return by_sum, by_mixed
