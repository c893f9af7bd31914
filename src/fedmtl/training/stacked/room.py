"""How many clients to train at once."""

from __future__ import annotations

import torch

from fedmtl.model.multitask import MultiTaskModel

# More than this adds nothing: the products are large enough.
MOST = 64
SHARE = 0.6


def clients_at_once(
    model: MultiTaskModel, batch_size: int, max_length: int, free_bytes: int, dtype: torch.dtype
) -> int:
    """As many as fit into a share of the free memory; 0 where the encoder is of a kind that cannot be stacked."""
    if model.layout is None:
        return 0
    return max(1, min(MOST, int(SHARE * free_bytes) // client_bytes(model, batch_size, max_length, dtype)))


def client_bytes(model: MultiTaskModel, batch_size: int, max_length: int, dtype: torch.dtype) -> int:
    """About what one client of a stack takes: values, where they began, gradients, AdamW's two means, activations."""
    assert model.layout is not None
    parameters: int = sum(getattr(module, leaf).numel() for module, leaf in model.canonical().values())
    computed = 0 if dtype == torch.float32 else dtype.itemsize
    width = int(model.token_table().weight.shape[1])
    # About 34 activations of the hidden width per token and layer are kept for the way back (Korthikanti et al. 2022).
    activations = 34 * width * model.layout.num_layers * batch_size * max_length
    return parameters * (5 * 4 + computed) + activations * dtype.itemsize // 2
