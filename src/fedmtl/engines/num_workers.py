"""How many worker processes a run gets. Loads no numeric library: it is asked before any is there."""

from __future__ import annotations

import os
from pathlib import Path

from fedmtl.config import ComputeConfig

GPU = Path("/dev/nvidiactl")


def num_workers(compute: ComputeConfig, device: str, num_clients: int) -> int:
    """As the config says; else one per core, none where a GPU computes or clients train at once. 0 is this process."""
    if compute.workers is not None:
        return compute.workers
    if device != "cpu" or compute.stack:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, max(num_clients, 2)))


def expects_workers(compute: ComputeConfig) -> bool:
    """Whether there will be workers, as far as can be told before a device was tried."""
    device = ("cuda" if GPU.exists() else "cpu") if compute.device == "auto" else compute.device
    return num_workers(compute, device, num_clients=2) > 0
