"""What numbers were measured on, in one line."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMPUTE = ("torch", "onnxruntime")


def machine() -> str:
    """The CPU, the cores this process may use, and the versions of what computes."""
    cores = len(os.sched_getaffinity(0))
    versions = [f"{name} {found}" for name in COMPUTE if (found := _version(name))]
    return ", ".join([_cpu(), f"{cores} {'core' if cores == 1 else 'cores'}", *versions])


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
