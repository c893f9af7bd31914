"""What an encoding loses of an update is added to the client's next one. Seide et al. 2014; Karimireddy et al. 2019.

Where we differ: the residual counts from the last update that the server accepted. It is stored with the rest of the
client's state of that round, so a refused update neither loses nor doubles it. Token rows are named by their number in
the whole table, so a client whose texts change keeps what belongs to each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.federation.filters.protocol import FilterClient, UpdateFilter
from fedmtl.federation.messages import Update
from fedmtl.federation.wire.codecs import CodedTensors
from fedmtl.federation.wire.messages import encode_delta
from fedmtl.sharing.plan import Extra, Key, Rows

NAME = "error_feedback"
RESIDUAL, RESIDUAL_ROWS = "residual", "residual_rows"


class ErrorFeedback(UpdateFilter):
    """Adds what is left of earlier updates to this one, encodes it, and stores what the encoding loses."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        rows = client.job.rows
        update_rows = {key: rows for key in update.delta if rows is not None and key.name == client.table}
        before, before_rows = _usable(client)
        whole = {
            key: value + _aligned(before[key], before_rows.get(key), update_rows.get(key), value)
            if key in before
            else value
            for key, value in update.delta.items()
        }
        sent = encode_delta(whole, client.job.codecs)
        residual, residual_rows = dict(before), dict(before_rows)
        for key in _lossy(sent):
            lost = whole[key] - sent[key]
            residual_rows.pop(key, None)
            if key in update_rows:
                lost, residual_rows[key] = _with_resting_rows(
                    lost, update_rows[key], before.get(key), before_rows.get(key)
                )
            residual[key] = lost
        return replace(update, delta=sent), Extra(tensors={RESIDUAL: residual, RESIDUAL_ROWS: residual_rows})


def _usable(client: FilterClient) -> tuple[Mapping[Key, Tensor], Mapping[Key, Tensor]]:
    """The stored residuals and their token rows.

    Where a plan has merged two tables of different rows, the rows are gone, and so the residual means nothing.
    """
    residual, rows = client.stored.slot(RESIDUAL), client.stored.slot(RESIDUAL_ROWS)
    if client.job.rows is None:
        return residual, rows
    return {key: value for key, value in residual.items() if key.name != client.table or key in rows}, rows


def _lossy(sent: Mapping[Key, Tensor]) -> list[Key]:
    return [key for key, coded in sent.coded.items() if coded.codec != "raw"] if isinstance(sent, CodedTensors) else []


def _aligned(residual: Tensor, old: Tensor | None, new: Rows | None, like: Tensor) -> Tensor:
    """The residual of the rows that this delta has; zero where there is none."""
    if old is None or new is None or np.array_equal(old.numpy(), new):
        return residual if residual.shape == like.shape else torch.zeros_like(like)
    aligned = torch.zeros_like(like)
    _, here, there = np.intersect1d(new, old.numpy(), assume_unique=True, return_indices=True)
    aligned[torch.from_numpy(here)] = residual[torch.from_numpy(there)]
    return aligned


def _with_resting_rows(lost: Tensor, rows: Rows, before: Tensor | None, old: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual of this delta's rows, and that of earlier rows which it does not have."""
    if before is None or old is None:
        return lost, torch.from_numpy(rows)
    resting = ~np.isin(old.numpy(), rows, assume_unique=True)
    if not resting.any():
        return lost, torch.from_numpy(rows)
    every = np.concatenate([rows, old.numpy()[resting]])
    order = torch.from_numpy(np.argsort(every, kind="stable"))
    return torch.cat([lost, before[torch.from_numpy(resting)]])[order], torch.from_numpy(every)[order]
