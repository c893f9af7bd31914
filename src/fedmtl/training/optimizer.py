"""The clients' optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.model.keys import Key
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.training.settings import LocalSettings


def undecayed(model: MultiTaskModel) -> set[str]:
    """Names of parameters that weight decay leaves alone: token and position tables, norms, biases."""
    return {
        name
        for name, (module, leaf) in model.canonical().items()
        if isinstance(module, nn.Embedding) or module._parameters[leaf].dim() < 2  # type: ignore[union-attr]
    }


def build_optimizer(
    parameters: Mapping[Key, nn.Parameter], no_decay: set[str], settings: LocalSettings
) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; the loop sets the learning rate of every step."""
    trainable = [(key, parameter) for key, parameter in parameters.items() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for key, parameter in trainable if (key.name in no_decay) == is_plain],
            "weight_decay": 0.0 if is_plain else settings.weight_decay,
        }
        for is_plain in (False, True)
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True)


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[Key, nn.Parameter]
) -> dict[str, dict[Key, Tensor]]:
    """Slot -> key -> tensor, for what a client keeps between rounds."""
    slots: dict[str, dict[Key, Tensor]] = {}
    for key, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                slots.setdefault(slot, {})[key] = value.detach().cpu().contiguous()
    return slots


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[Key, nn.Parameter],
    slots: Mapping[str, Mapping[Key, Tensor]],
) -> None:
    """Put back what `optimizer_state` took; keys that are gone are left out."""
    for slot, values in slots.items():
        for key, value in values.items():
            if key in parameters:
                parameter = parameters[key]
                device = parameter.device if value.dim() or parameter.device.type == "cuda" else value.device
                optimizer.state[parameter][slot] = value.to(device, copy=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], max_norm)
