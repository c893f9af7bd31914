"""Compile kernels.c where that is possible: python -m fedmtl.model.bert.cpu.compile_kernels

Run by itself too, without the package, when a wheel is built.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = (
    "-O3", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-ffp-contract=fast", "-fassociative-math",
    "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC",
)  # fmt: skip


def compile_kernels(target: Path = FOLDER / "_kernels.so") -> Path | None:
    """The library, or None where there is no compiler, no fitting CPU to compile for, or it failed."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = [compiler, *FLAGS, str(FOLDER / "kernels.c"), "-o", str(unfinished), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        unfinished.replace(target)
    except (subprocess.SubprocessError, OSError):
        unfinished.unlink(missing_ok=True)
        return None
    return target


if __name__ == "__main__":
    print(compile_kernels() or "not compiled: there is no gcc here, or no x86-64 Linux, or it failed")
