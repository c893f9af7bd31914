"""Where a run computes: the device, the worker processes, and how many clients train at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedmtl.config import Config
from fedmtl.engines.num_workers import num_workers
from fedmtl.errors import ConfigError
from fedmtl.model.device import pick_device
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.training.stacked.room import clients_at_once

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Compute:
    """`stack` clients train as one computation in `precision`; 0 where each trains by itself."""

    device: str
    workers: int
    stack: int = 0
    precision: str = "fp32"


def choose_device(config: Config) -> str:
    return str(pick_device(config.compute.device, "compute.device"))


def choose_compute(config: Config, device: str, model: MultiTaskModel, num_clients: int) -> Compute:
    """What the config says, and for what it leaves open what suits the machine."""
    workers = num_workers(config.compute, device, num_clients)
    asked = config.compute.stack
    if asked and workers:
        raise ConfigError(f"compute.stack: {asked} clients at once train in one process; write `workers: 0`")
    if asked and model.layout is None:
        raise ConfigError("compute.stack: only plain encoders laid out as BERT can be stacked; write `stack: 0`")
    precision = config.compute.precision
    if precision == "auto":
        precision = "bf16" if device != "cpu" and torch.cuda.is_bf16_supported() else "fp32"
    stack = 0 if asked is None and (workers or device == "cpu") else asked
    if stack is None:
        free, _ = torch.cuda.mem_get_info(device)
        largest = max(map(config.batch_size_of, config.tasks))
        stack = clients_at_once(model, largest, config.model.max_length, free, DTYPES[precision])
    if stack == 0:
        if config.compute.precision == "bf16":
            raise ConfigError("compute.precision: bf16 is for clients that train at once; write `stack: 1` or more")
        precision = "fp32"
    return Compute(device, workers, min(stack, num_clients), precision)
