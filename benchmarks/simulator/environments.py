"""Virtual environments of the contestants that fedmtl does not install itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The plain name would pull gigabytes of CUDA packages, so torch goes first and is pinned.
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.22.2"


@dataclass(frozen=True)
class Environment:
    name: str
    packages: tuple[str, ...]
    proof: str


FLOWER = Environment("flower", (TRANSFORMERS, "flwr[simulation]==1.41.0"), "import flwr, ray, transformers")
PFL = Environment("pfl", (TRANSFORMERS, "pfl==0.6.*"), "import pfl, torch, transformers")
TRAINER = Environment("hf", (TRANSFORMERS, "accelerate"), "import accelerate, transformers")


class NotInstalled(Exception):
    """An environment that could not be made, in one line."""


def python_of(environment: Environment | None, folder: Path) -> Path:
    """The interpreter of an environment, which is made where it is not there yet; None is this one."""
    if environment is None:
        return Path(sys.executable)
    venv = folder.resolve() / environment.name
    python = venv / "bin" / "python"
    stamp = venv / ".installed"
    wanted = " ".join((TORCH, *environment.packages))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment {environment.name}: {wanted}", file=sys.stderr, flush=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(venv)],
        [*install, TORCH],
        [*install, *environment.packages, TORCH],
        [str(python), "-c", environment.proof],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
            raise NotInstalled(f"{environment.name} cannot be installed ({last.strip()})")
    stamp.write_text(wanted)
    return python
