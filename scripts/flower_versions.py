"""Run the tests of `engines/flower` on the lowest and the newest version of Flower that this project takes.

    python scripts/flower_versions.py [VERSION ...] [-- PYTEST OPTIONS]

Each version goes into a folder of its own without what it depends on: its caps (certifi, protobuf, rich) cannot always
be met, and its code is what is tested. Without options, the fast tests of what imports Flower run, then `flwr run` on a
SuperLink. This needs the network or a mirror of PyPI, and takes minutes a version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("1.40.0", "1.42.0")
DEFAULT = [
    ["tests/engines/flower", "tests/deploy/test_flower_app.py"],
    ["-m", "slow", "tests/deploy/test_flower_run.py"],
]


def run_tests(version: str, options: list[list[str]]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps")
        subprocess.run([*pip, "--target", folder, f"flwr=={version}"], check=True)
        path = os.pathsep.join((folder, str(ROOT / "src")))
        programs = os.pathsep.join((f"{folder}/bin", os.environ["PATH"]))
        environment = {**os.environ, "PYTHONPATH": path, "PATH": programs, "HF_HUB_OFFLINE": "1"}
        print(f"flwr {version}", flush=True)
        codes = [
            subprocess.run([sys.executable, "-m", "pytest", "-q", *each], cwd=ROOT, env=environment).returncode
            for each in options
        ]
        return max(codes)


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options = [given[cut + 1 :]] if given[cut + 1 :] else DEFAULT
    results = {version: run_tests(version, options) for version in given[:cut] or VERSIONS}
    sys.exit(max(results.values()))


if __name__ == "__main__":
    main()
