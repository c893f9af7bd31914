"""A gradient for every example of a batch: the squared norms, and sums with a factor for each example.

`ExampleModules` is for any encoder made of linear layers, layer norms and tables, whose parts are modules that are
called; `bert/cpu/per_example.py` is the same for the packed pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmtl.model.bert.cpu.encoder import is_reached
from fedmtl.model.bert.cpu.encoder_pass import kernels as kernels_for
from fedmtl.model.bert.cpu.per_example import Owners, Squares, linear_squares, table_squares
from fedmtl.model.multitask import Inputs, MultiTaskModel
from fedmtl.sharing.plan import HEADS

# Outputs and labels of some examples -> the loss of each.
Losses = Callable[[Tensor, Tensor], Tensor]
# A clipped gradient stays below the bound by this, beside what a rounded factor may add: one part in 256 in bf16.
MARGIN = 1e-5
# Numbers that a product adds up in single precision or more, one after the other, each rounded.
LONGEST_PRODUCT = 4096


class Unattributed(Exception):
    """A module's gradients cannot be told apart by example, such as those of a table of relative positions."""


@dataclass(frozen=True)
class _Call:
    """What a module was given, and what came out."""

    inputs: Tensor
    output: Tensor


class ModuleRecords:
    """What linear layers, layer norms and tables were given in one pass, and the gradients of what came out.

    `trained` are the values whose gradients are wanted, by canonical name: the module that has each, and its attribute.
    """

    def __init__(self, trained: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._names: dict[nn.Module, dict[str, str]] = {}
        for name, (module, leaf) in trained.items():
            if _kind(module) is None:
                raise Unattributed(f"{name} belongs to a {type(module).__name__}")
            self._names.setdefault(module, {})[leaf] = name
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._gradients: list[Tensor | None] = []

    @contextmanager
    def listening(self, num_examples: int, num_rows: int, owners: Sequence[Tensor] = ()) -> Iterator[None]:
        """Remember what modules are given meanwhile: one entry for each example, row, or token of these `owners`.

        Rows are those of all examples' first texts, then of all second ones.
        """
        self._num_rows, self._num_examples = num_rows, num_examples
        rows = torch.arange(num_rows) % num_examples
        self._owners = {len(of): of for of in (*owners, rows, rows[:num_examples])}
        self._calls = {}
        handles = []
        for module in self._names:
            if _kind(module) == "table":
                handles.append(module.register_forward_pre_hook(self._spread))
            handles.append(module.register_forward_hook(self._note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, loss: Tensor, others: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        """Follow the sum of all losses back to what modules gave out; return the gradients of the other tensors."""
        outputs = [call.output for calls in self._calls.values() for call in calls]
        wanted = [*others, *outputs]
        found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        self._gradients = list(found[len(others) :])
        return tuple(found[: len(others)])

    @torch.no_grad()
    def squares(self) -> Squares:
        """The squared norm of every example's gradient."""
        some = next((call.inputs for calls in self._calls.values() for call in calls), None)
        device = torch.device("cpu") if some is None else some.device
        squares = Squares.of_none(self._num_examples, device)
        for module, inputs, gradient, owners in self._joined():
            names, kind = self._names[module], _kind(module)
            compiled = kernels_for(gradient.dtype) if device.type == "cpu" else None
            if kind == "table":
                padding: Any = module.padding_idx
                words = names["weight"]
                table_squares({words: inputs}, gradient, owners, (words, padding), squares, compiled)
            elif kind == "linear" and "weight" in names:
                linear_squares(inputs, gradient, owners, squares, compiled, bias="bias" in names)
            else:
                for sums in self._summed(module, inputs, gradient, owners).values():
                    squares.found.add_(sums.double().square().sum(1))
        return squares

    @torch.no_grad()
    def write(self, factors: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Write the sum of the examples' gradients, each times its factor, into the tensors of these names."""
        for module, inputs, gradient, owners in self._joined():
            names, kind = self._names[module], _kind(module)
            own = factors.to(gradient.dtype)
            if kind == "norm" or "weight" not in names:
                # A sum over tokens that nearly cancel is rounded once: what was measured is what is scaled.
                for name, sums in self._summed(module, inputs, gradient, owners).items():
                    torch.mv(sums.t(), own, out=targets[name])
                continue
            scaled = gradient * own.index_select(0, owners.of).unsqueeze(1)
            if kind == "table":
                target, padding = targets[names["weight"]], module.padding_idx
                target.zero_().index_add_(0, inputs, scaled)
                if padding is not None:
                    target[padding] = 0.0
            else:
                torch.mm(scaled.t(), inputs, out=targets[names["weight"]])
                if "bias" in names:
                    torch.sum(scaled, 0, out=targets[names["bias"]])

    def _joined(self) -> Iterator[tuple[Any, Tensor, Tensor, Owners]]:
        """Every module with all that it was given, as tokens: a layer that is called twice has one gradient."""
        at = 0
        for module, calls in self._calls.items():
            gradients = self._gradients[at : at + len(calls)]
            at += len(calls)
            used = [(call, by) for call, by in zip(calls, gradients, strict=True) if by is not None]
            if not used:
                continue
            owners = torch.cat([self._owners_of(by) for _, by in used])
            flat = torch.cat([by.reshape(-1, by.shape[-1]) for _, by in used])
            if _kind(module) == "table":
                inputs = torch.cat([call.inputs.reshape(-1) for call, _ in used])
            else:
                inputs = torch.cat([call.inputs.reshape(-1, call.inputs.shape[-1]) for call, _ in used])
            yield module, inputs, flat, Owners.of_tokens(owners, self._num_examples)

    def _summed(self, module: Any, inputs: Tensor, gradient: Tensor, owners: Owners) -> dict[str, Tensor]:
        """Every example's gradient of a norm's weight and bias, or of a linear layer's bias."""
        names = self._names[module]
        shape = owners.num, gradient.shape[1]
        found = {}
        if "weight" in names:
            normed = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
            found[names["weight"]] = gradient.new_zeros(shape).index_add_(0, owners.of, gradient * normed)
        if "bias" in names:
            found[names["bias"]] = gradient.new_zeros(shape).index_add_(0, owners.of, gradient)
        return found

    def _owners_of(self, gradient: Tensor) -> Tensor:
        of = self._owners[len(gradient)].to(gradient.device)
        return of.repeat_interleave(gradient[0, ..., 0].numel())

    def _spread(self, module: nn.Module, given: Any) -> Any:
        """Positions are looked up once for all rows: look them up for each, so that each has its gradient."""
        index, *others = given
        if index.dim() > 1 and len(index) == 1 and self._num_rows > 1:
            return (index.expand(self._num_rows, *index.shape[1:]), *others)
        return None

    def _note(self, module: nn.Module, given: Any, output: Tensor) -> None:
        inputs = given[0].detach()
        if len(output) not in self._owners or len(inputs) != len(output):
            raise Unattributed(f"a {type(module).__name__} is not computed row by row")
        if output.requires_grad:
            self._calls.setdefault(module, []).append(_Call(inputs, output))


def _kind(module: nn.Module) -> str | None:
    """What its gradients are made like; None for a module that is not known."""
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, nn.LayerNorm) and forward is nn.LayerNorm.forward:
        return "norm" if len(module.normalized_shape) == 1 else None
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        return "table" if module.max_norm is None and not module.scale_grad_by_freq else None
    return None


@dataclass(frozen=True)
class Clip:
    """The most that the norm of an example's gradient may be, and what all of them are multiplied by afterwards.

    It holds for what is really added up, computed in `dtype`, whatever the gradients are. Rounding moves a squared norm
    by a share of the aligned one, and each term of a sum by one of itself; both count as if they made it longer.
    """

    max_norm: float
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def factors(self, squares: Squares) -> Tensor:
        """What every example's gradient is multiplied by, from its squared norm."""
        rounded = torch.finfo(self.dtype).eps / 2
        summed = LONGEST_PRODUCT * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        norms = (squares.found.clamp(min=0.0) + summed * squares.aligned).sqrt() + rounded * squares.aligned.sqrt()
        bound = self.max_norm * (1 - MARGIN - rounded)
        return self.scale * bound / norms.clamp(min=bound)


class ExampleGradients:
    """Sums of the examples' gradients of one task, each clipped by itself, for a model that has its values bound.

    `names` are the values that a step moves, of those that are `trained`. BERT on a CPU is computed by its packed pass,
    elsewhere and other encoders by modules that are listened to. Where a module's gradients cannot be told apart, every
    example has a pass of its own.
    """

    def __init__(self, model: MultiTaskModel, task: str, trained: Sequence[str]) -> None:
        self._model, self._task, self._is_packed = model, task, model.writes_gradients
        if self._is_packed:
            self.names = [name for name in trained if name.startswith(HEADS) or is_reached(name, model.pools[task])]
        else:
            self.names = self._used(trained)
        self._modules = {name: model.canonical()[name] for name in self.names}
        listened = {name: at for name, at in self._modules.items() if name.startswith(HEADS) or not self._is_packed}
        try:
            self._records: ModuleRecords | None = ModuleRecords(listened)
        except Unattributed:
            self._records = None

    @property
    def is_one_by_one(self) -> bool:
        """Whether every example has a pass of its own."""
        return self._records is None

    def clipped(self, inputs: Inputs, labels: Tensor, losses: Losses, clip: Clip, into: Mapping[str, Tensor]) -> Tensor:
        """Write the sum of the clipped gradients over the tensors of `names`; return the loss of every example."""
        if self._records is not None:
            try:
                if self._is_packed:
                    return self._by_pass(self._records, inputs, labels, losses, clip, into)
                return self._by_modules(self._records, inputs, labels, losses, clip, into)
            except Unattributed:
                self._records = None
        return self._one_by_one(inputs, labels, losses, clip, into)

    def _by_pass(
        self, records: ModuleRecords, inputs: Inputs, labels: Tensor, losses: Losses, clip: Clip,
        into: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        run = self._model.example_pass(self._task, inputs, len(labels))
        vectors = run.vectors.requires_grad_()
        with records.listening(len(labels), len(labels)):
            each = losses(self._model.head(self._task, vectors), labels)
        (by_vectors,) = records.backward(each.sum(), [vectors])
        assert by_vectors is not None
        factors = clip.factors(run.squares(by_vectors) + records.squares()).to(vectors.dtype)
        run.write(factors, into)
        records.write(factors, into)
        return each.detach()

    def _by_modules(
        self, records: ModuleRecords, inputs: Inputs, labels: Tensor, losses: Losses, clip: Clip,
        into: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        # A table that is looked up by pairs of positions must not be taken for one that is looked up by rows.
        while inputs.ids.shape[1] in (1, len(labels), len(inputs.ids)):
            inputs = inputs.widened(self._model.pad_id)
        with records.listening(len(labels), len(inputs.ids), self._model.token_owners(inputs, len(labels))):
            each = losses(self._model(self._task, inputs, called=True), labels)
        for name in self.names:
            into[name].zero_()
        records.backward(each.sum())
        records.write(clip.factors(records.squares()), into)
        return each.detach()

    def _one_by_one(
        self, inputs: Inputs, labels: Tensor, losses: Losses, clip: Clip, into: Mapping[str, Tensor]
    ) -> Tensor:
        parameters = [getattr(module, leaf) for module, leaf in self._modules.values()]
        found = []
        for name in self.names:
            into[name].zero_()
        for number in range(len(labels)):
            own = Inputs(*(part[number :: len(labels)] for part in (inputs.ids, inputs.mask, inputs.segments)))
            each = losses(self._outputs(own), labels[number : number + 1])
            gradients = torch.autograd.grad(each.sum(), parameters, allow_unused=True)
            square = Squares.of_none(1, labels.device)
            for gradient in gradients:
                square.found.add_(0.0 if gradient is None else gradient.double().square().sum())
            (factor,) = clip.factors(square)
            for name, gradient in zip(self.names, gradients, strict=True):
                if gradient is not None:
                    into[name].add_(gradient * factor.to(gradient.dtype))
            found.append(each.detach())
        return torch.cat(found)

    def _outputs(self, inputs: Inputs) -> Tensor:
        """What autograd follows back to every parameter."""
        before, self._model.adds_gradients = self._model.adds_gradients, True
        try:
            outputs: Tensor = self._model(self._task, inputs)
            return outputs
        finally:
            self._model.adds_gradients = before

    def _used(self, trained: Sequence[str]) -> list[str]:
        """The names of values that an output depends on; no example is looked at."""
        model = self._model
        found = {name: model.canonical()[name] for name in trained}
        parameters = [getattr(module, leaf) for module, leaf in found.values()]
        ids = torch.zeros((2 if model.tasks[self._task].is_dual else 1, 3), dtype=torch.int64)
        ids = ids.to(parameters[0].device) if parameters else ids
        was_training = model.training
        model.eval()
        outputs = self._outputs(Inputs(ids, torch.ones_like(ids), torch.zeros_like(ids)))
        model.train(was_training)
        gradients = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True) if parameters else ()
        return [name for name, gradient in zip(found, gradients, strict=True) if gradient is not None]
