"""Puts compiled kernels into the wheel where there is a compiler; without them the package uses torch's operations."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "src/fedmtl/model/bert/cpu/compile_kernels.py"


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        library = runpy.run_path(str(root / SCRIPT))["compile_kernels"]()
        if library is not None:
            build_data["artifacts"].append(library.relative_to(root).as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
