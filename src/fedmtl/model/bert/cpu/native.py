"""Compiled kernels (kernels.c), where this machine has them; every caller has torch operations for where it has not."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("_kernels.so")

SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}

# What each takes: n a whole number, p an address, r a real number.
SIGNATURES = {
    "linear": "nnnppppp",
    "linear_inputs": "nnnpppn",
    "linear_values": "nnnppp",
    "attend": "nnnnpppppp",
    "attend_backward": "nnnnppppppp",
    "first_attend": "nnnn" + 14 * "p",
    "first_attend_backward": "nnnn" + 22 * "p",
    "add_norm": "nnpppppr" + "pp",
    "norm_backward": "nn" + 9 * "p",
}


@cache
def load(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """The library, or None where there is none, or none that this CPU can run."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return library if library.is_supported() else None


class Kernels:
    """The kernels for one dtype; all tensors are contiguous and on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        # Two vectors of 64 bytes.
        self.block = 128 // dtype.itemsize
        kinds = {"n": ctypes.c_ssize_t, "p": ctypes.c_void_p, "r": ctypes.c_float}
        if dtype == torch.float64:
            kinds["r"] = ctypes.c_double
        self._functions = {}
        for name, signature in SIGNATURES.items():
            function = getattr(library, f"{name}_{SUFFIXES[dtype]}")
            function.argtypes, function.restype = [kinds[kind] for kind in signature], None
            self._functions[name] = function

    def fits(self, *sizes: int) -> bool:
        """Whether products may have these numbers of columns."""
        return all(size % self.block == 0 for size in sizes)

    def call(self, name: str, *arguments: int | float | Tensor | None) -> None:
        """Tensors go as their addresses."""
        self._functions[name](*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    library = load()
    return None if library is None else Kernels(library, dtype)


def kernels(dtype: torch.dtype) -> Kernels | None:
    """Kernels of one thread, where torch may use no more either: with several, torch's operations are faster."""
    return _kernels(dtype) if dtype in SUFFIXES and torch.get_num_threads() == 1 else None
