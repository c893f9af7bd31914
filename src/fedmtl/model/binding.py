"""A model with a client's values in it: the parameters are the values of a slice, one per key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedmtl.model.keys import Key, Weights
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.model.plan import SharingPlan
from fedmtl.model.vocabulary import Rows, compact_ids


class BoundModel:
    """Puts a slice's values into the model, and switches those that differ between tasks.

    Where a layer is at level group or task, a client with several tasks holds several values of it; `use`
    makes one task's the current ones. Fixed values take no gradient.
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
    ) -> None:
        self.model = model
        self.views = plan.keys(model.canonical(), tasks, client)
        keys = dict.fromkeys(key for view in self.views.values() for key in view.values())
        self.parameters: dict[Key, nn.Parameter] = {
            key: nn.Parameter(weights[key].detach().to(device, copy=True), requires_grad=key.scope != "fixed")
            for key in keys
        }
        self.index = self._compact(rows)
        self._current: dict[str, Key] = {}
        self.use(tasks[0])

    def use(self, task: str) -> MultiTaskModel:
        """The model with this task's values in place."""
        places = self.model.canonical()
        for name, key in self.views[task].items():
            if self._current.get(name) != key:
                module, leaf = places[name]
                module._parameters[leaf] = self.parameters[key]
                self._current[name] = key
        return self.model

    def values(self) -> Weights:
        return {key: parameter.detach() for key, parameter in self.parameters.items()}

    def _compact(self, rows: Rows | None) -> np.ndarray | None:
        """The map from token ids into the compacted table; None where the table is whole."""
        table = self.model.token_table()
        if table.padding_idx is not None:
            table.padding_idx = self.model.pad_id if rows is None else int(np.searchsorted(rows, self.model.pad_id))
        return None if rows is None else compact_ids(rows, self.model.vocabulary_size)
