"""Federated multi-task learning for text: one shared encoder, one head per task, many owners of data."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Imported when first asked for: `import fedmtl` loads no numeric library.
_PUBLIC = {
    "Config": "fedmtl.config",
    "FedmtlError": "fedmtl.errors",
    "MTLAggregator": "fedmtl.federation.guide",
    "MTLServerModel": "fedmtl.federation.guide",
    "load_config": "fedmtl.config.file",
    "load_run": "fedmtl.predict.run",
    "resume_run": "fedmtl.experiment.run",
    "start_run": "fedmtl.experiment.run",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedmtl' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
