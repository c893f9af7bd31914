"""The dropout masks of one computation, given again to transformers' own modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from fedmtl.model.bert.layout import MaskSource, random_masks


class Recorder:
    """Stands in for `MultiTaskModel.draw_masks`; `passes` has the masks of every pass by site, in order."""

    def __init__(self) -> None:
        self.passes: list[dict[str, Tensor]] = []

    def __call__(self, like: Tensor) -> MaskSource:
        drawn = random_masks(like)
        own: dict[str, Tensor] = {}
        self.passes.append(own)

        def source(site: str, shape: tuple[int, ...], p: float) -> Tensor | None:
            mask = drawn(site, shape, p)
            if mask is not None:
                own[site] = mask
            return mask

        return source


@contextmanager
def replayed(masks: dict[str, Tensor], real: Tensor) -> Iterator[None]:
    """Dropout multiplies by these masks, in the order in which BertModel drops; `real` is the attention mask."""
    waiting = list(masks.values())

    def dropout(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return inputs * _spread(waiting.pop(0), inputs, real) if training and p > 0 else inputs

    with mock.patch("torch.nn.functional.dropout", dropout):
        yield
    assert not waiting, "transformers dropped at fewer places"


def _spread(mask: Tensor, inputs: Tensor, real: Tensor) -> Tensor:
    """A mask of the real tokens, or of first positions only, as one of the padded batch; elsewhere nothing drops."""
    full = torch.ones_like(inputs)
    if inputs.dim() == 4:
        if mask.dim() == 3 and mask.shape[0] == inputs.shape[0] * inputs.shape[1]:
            # Attention may be computed a little wider than the batch.
            width = inputs.shape[-1]
            return mask.view(*inputs.shape[:2], *mask.shape[1:])[..., :width, :width]
        full[:, :, 0] = mask
    elif len(mask) == int(real.sum()):
        full[real.bool()] = mask
    else:
        full[:, 0] = mask
    return full
