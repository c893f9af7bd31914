"""What a teacher says of every example of a text set: one float32 row each, in a file beside the tokens."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt


def save_outputs(path: Path, outputs: np.ndarray) -> None:
    """Write all or nothing."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".outputs-", dir=path.parent, delete=False) as file:
            np.save(file, outputs.astype(np.float32))
        Path(file.name).replace(path)
    except OSError as error:
        raise FedmtlError(
            f"data.cache: cannot write a teacher's outputs to {path.parent} ({error.strerror or error});"
            " make room there, or name another folder"
        ) from error


@lru_cache(maxsize=64)
def open_outputs(path: Path) -> np.ndarray:
    """As a memory map, so that a worker holds only what it reads."""
    remedy = "delete it, and the teacher answers again"
    try:
        outputs = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # numpy's reader of headers raises any kind
        raise FedmtlError(f"{path}: cannot be read ({excerpt(error)}); {remedy}") from error
    if outputs.dtype.kind != "f" or outputs.ndim != 2:
        raise FedmtlError(f"{path}: is not a teacher's outputs; {remedy}")
    return outputs
