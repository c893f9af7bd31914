"""A model with a client's values in it: the parameters are the values of a slice, one per key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedmtl.errors import ModelError
from fedmtl.model.encoder import position_origin
from fedmtl.model.flat import Buffers, Flat, flat_order, flatten, undecayed
from fedmtl.model.keys import Key, Weights
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.model.plan import SharingPlan
from fedmtl.model.vocabulary import Rows, compact_ids


class BoundModel:
    """Puts a slice's values into the model, and switches those that differ between tasks.

    Where a layer is at level group or task, a client with several tasks holds several values of it; `use`
    makes one task's the current ones. Fixed values take no gradient. The others are views of one buffer, `flat`, which
    comes from `buffers` and is valid until the next model is bound with them. A model that is only `read` shares the
    memory of the weights it was given.
    """

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
        """The model with this task's values in place, whoever used it in between."""
        places = self.model.canonical()
        for name, key in self.views[task].items():
            module, leaf = places[name]
            if module._parameters[leaf] is not self.parameters[key]:
                module._parameters[leaf] = self.parameters[key]
        table = self.model.token_table()
        if table.padding_idx is not None:
            table.padding_idx = self._pad
        self.model.room.gradients = self.gradients.get(task, {})
        return self.model

    def values(self) -> Weights:
        return {key: parameter.detach() for key, parameter in self.parameters.items()}

    def _parameter(self, key: Key, weights: Weights, device: torch.device | None) -> nn.Parameter:
        if key in self.flat.places:
            return nn.Parameter(self.flat.values[self.flat.places[key]].view(weights[key].shape))
        return nn.Parameter(weights[key].detach().to(device), requires_grad=False)

    def _check_positions(self) -> None:
        origin = position_origin(self.model.encoder)
        if self.index is not None and origin is not None and self.index[origin] != origin:
            raise ModelError(
                f"federation.vocabulary_slices: this encoder counts positions from its padding id {origin}, which a "
                "slice moves; write `vocabulary_slices: false`"
            )
