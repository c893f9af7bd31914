"""Which device to compute on."""

from __future__ import annotations

import torch

from fedmtl.errors import ConfigError


def pick_device(name: str, key: str) -> torch.device:
    """The device of that name, tried out; `auto` is a GPU where there is one. `key` is the setting an error names."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(chosen)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {chosen} cannot be used here; write `cpu` or `auto`. [{reason}]") from error
    return device
