"""The encoder by compiled kernels, or by torch's operations, whatever this installation has."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from fedmtl.model.bert.cpu.compile_kernels import compile_kernels
from fedmtl.model.bert.cpu.encoder_pass import Kernels, load


@cache
def compiled(dtype: torch.dtype) -> Kernels | None:
    """Compiled anew, so that what is tested is the source."""
    with tempfile.TemporaryDirectory() as folder:
        target = compile_kernels(Path(folder) / "kernels.so")
        library = None if target is None else load(target)
    return None if library is None else Kernels(library, dtype)


def compute_by(means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels` or `torch`; skips the test where nothing can be compiled."""
    if means == "kernels" and compiled(torch.float64) is None:
        pytest.skip("no compiler, or a CPU without AVX-512")
    monkeypatch.setattr("fedmtl.model.bert.cpu.encoder.kernels", compiled if means == "kernels" else lambda dtype: None)
