"""A model with a client's values in it: the parameters are the values of a slice, one per key.

All values that train lie end to end in one buffer, and each parameter is a view of its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedmtl.errors import ModelError
from fedmtl.model.encoder import position_origin
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.keys import HEADS, Key, Weights
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.vocabulary import Rows, compact_ids
from fedmtl.timing import timed


@dataclass
class Buffers:
    """Memory that is used again from one client to the next; a buffer is valid until its name is taken again."""

    by_name: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of that size with arbitrary content."""
        known = self.by_name.get(name)
        if known is None or known.numel() < size or known.dtype != dtype or known.device != device:
            # Clients differ a little in size: some spare memory saves the next one a new buffer.
            known = self.by_name[name] = torch.empty(size + size // 8, dtype=dtype, device=device)
        return known[:size]


@dataclass(frozen=True)
class Flat:
    """A buffer of values, and the span of each key in it, in order."""

    values: Tensor
    spans: Mapping[Key, slice]


def flatten(weights: Weights, order: Sequence[Key], buffers: Buffers, device: torch.device | None) -> Flat:
    """Copy these keys' values into a buffer, in that order."""
    spans: dict[Key, slice] = {}
    total = 0
    for key in order:
        spans[key] = slice(total, total + weights[key].numel())
        total += weights[key].numel()
    dtypes = {weights[key].dtype for key in order} or {torch.get_default_dtype()}
    assert len(dtypes) == 1, "the trainable values of a model have one dtype"
    target = torch.device("cpu") if device is None else device
    values = buffers.take("values", total, dtypes.pop(), target)
    for key, span in spans.items():
        values[span].copy_(weights[key].detach().reshape(-1))
    return Flat(values, spans)


def is_decayed(module: nn.Module, parameter: Tensor) -> bool:
    """Whether weight decay is for this parameter of a module; tables, norms and biases are left alone."""
    return parameter.dim() >= 2 and not isinstance(module, nn.Embedding)


def undecayed(model: MultiTaskModel) -> set[str]:
    """Names of parameters that weight decay leaves alone."""
    return {name for name, (module, leaf) in model.canonical().items() if not is_decayed(module, getattr(module, leaf))}


def flat_order(views: Mapping[str, Mapping[str, Key]], keys: Iterable[Key], plain: set[str]) -> list[Key]:
    """The keys so that those with one decay, one rate and the same tasks are neighbours, and step in one call."""
    users: dict[Key, tuple[str, ...]] = {}
    for task, view in views.items():
        for key in view.values():
            users[key] = (*users.get(key, ()), task)
    return sorted(keys, key=lambda key: (key.name in plain, key.name.startswith(HEADS), users[key]))


class BoundModel:
    """Puts a slice's values into the model, and switches those that differ between tasks.

    Where a layer is at level group or task, a client with several tasks holds several values of it; `use`
    makes one task's the current ones. Fixed values take no gradient. The others are views of one buffer, `flat`, which
    comes from `buffers` and is valid until the next model is bound with them. A model that is only `read` shares the
    memory of the weights it was given.
    """

    @timed("binding")
    def __init__(
        self,
        model: MultiTaskModel,
        plan: SharingPlan,
        tasks: Sequence[str],
        client: str,
        weights: Weights,
        rows: Rows | None = None,
        device: torch.device | None = None,
        buffers: Buffers | None = None,
        *,
        read: bool = False,
    ) -> None:
        self.model = model
        model.adds_gradients = False
        self.buffers = buffers or Buffers()
        self.views = plan.keys(model.canonical(), tasks, client)
        keys = dict.fromkeys(key for view in self.views.values() for key in view.values())
        trained = [] if read else [key for key in keys if key.scope != "fixed"]
        order = flat_order(self.views, trained, undecayed(model))
        self.flat: Flat = flatten(weights, order, self.buffers, device)
        self.parameters: dict[Key, nn.Parameter] = {key: self._parameter(key, weights, device) for key in keys}
        # Task -> canonical name -> where the encoder's gradients go, as far as that is known.
        self.gradients: dict[str, dict[str, Tensor]] = {}
        self.index = None if rows is None else compact_ids(rows, model.vocabulary_size)
        self._pad = model.pad_id if self.index is None else int(self.index[model.pad_id])
        self._check_positions()
        self.use(tasks[0])

    def use(self, task: str) -> MultiTaskModel:
        """Return the model with this task's values in it, whoever used it in between."""
        canonical = self.model.canonical()
        for name, key in self.views[task].items():
            module, leaf = canonical[name]
            if module._parameters[leaf] is not self.parameters[key]:
                module._parameters[leaf] = self.parameters[key]
        table = self.model.token_table()
        if table.padding_idx is not None:
            table.padding_idx = self._pad
        self.model.memory.gradients = self.gradients.get(task, {})
        return self.model

    def weights(self) -> Weights:
        """Return the bound values by key, which share the parameters' memory."""
        return {key: parameter.detach() for key, parameter in self.parameters.items()}

    def _parameter(self, key: Key, weights: Weights, device: torch.device | None) -> nn.Parameter:
        if key in self.flat.spans:
            return nn.Parameter(self.flat.values[self.flat.spans[key]].view(weights[key].shape))
        return nn.Parameter(weights[key].detach().to(device), requires_grad=False)

    def _check_positions(self) -> None:
        origin = position_origin(self.model.encoder)
        if self.index is not None and origin is not None and self.index[origin] != origin:
            raise ModelError(
                f"federation.vocabulary_slices: this encoder counts positions from its padding id {origin}, which a "
                "slice moves; write `vocabulary_slices: false`"
            )
