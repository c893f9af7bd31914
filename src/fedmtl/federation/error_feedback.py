"""What an encoding loses of an update is added to the client's next one. Seide et al. 2014; Karimireddy et al. 2019.

Where we differ: the residual counts from the last update that the server accepted. It is kept with the rest of the
client's state of that round, so a refused update neither loses nor doubles it. Token rows are named by their place in
the whole table, so a client whose texts change keeps what belongs to each row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedmtl.federation.messages import Codecs
from fedmtl.federation.wire.codecs import CodedTensors, encode_tensors
from fedmtl.sharing.keys import Key, Weights
from fedmtl.sharing.vocabulary import Rows

RESIDUAL, RESIDUAL_ROWS = "residual", "residual_rows"

Slots = dict[str, Weights]


def encode_delta(
    delta: Weights, rows: Rows | None, table: str, codecs: Codecs, kept: Mapping[str, Weights]
) -> tuple[Mapping[Key, Tensor], Slots]:
    """The delta as it is sent, and the slots of client state that replace those `kept` under the same names.

    `rows` are the token rows of the parameter called `table`, where it is sliced.
    """
    if codecs.up == "fp32":
        return delta, {}
    if not codecs.error_feedback:
        return encode_tensors(delta, lambda key: codecs.up, codecs.topk_share), {}
    own_rows = {key: rows for key in delta if rows is not None and key.name == table}
    before, before_rows = kept.get(RESIDUAL, {}), kept.get(RESIDUAL_ROWS, {})
    whole = {
        key: value + _aligned(before[key], before_rows.get(key), own_rows.get(key), value) if key in before else value
        for key, value in delta.items()
    }
    sent = encode_tensors(whole, lambda key: codecs.up, codecs.topk_share)
    residual, residual_rows = dict(before), dict(before_rows)
    for key in _lossy(sent):
        lost = whole[key] - sent[key]
        if key in own_rows:
            lost, residual_rows[key] = _with_resting_rows(lost, own_rows[key], before.get(key), before_rows.get(key))
        residual[key] = lost
    return sent, {RESIDUAL: residual, RESIDUAL_ROWS: residual_rows}


def _lossy(sent: CodedTensors) -> list[Key]:
    return [key for key, coded in sent.coded.items() if coded.codec != "raw"]


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
