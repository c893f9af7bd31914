"""The tiny encoders of tests/model: each folder of tests is a package of its own, so they are loaded by path."""

import runpy
from pathlib import Path

globals().update(runpy.run_path(str(Path(__file__).parents[1] / "model" / "tiny.py")))
