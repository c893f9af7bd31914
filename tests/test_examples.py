"""The notebook a newcomer opens first runs as it stands, and shows what it showed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))


def shown(notebook: Path) -> list[list[str]]:
    """For every code cell, what kinds of output it has."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [[output["output_type"] for output in cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_in_every_cell_what_it_was_committed_with(notebook, tmp_path):
    copy = tmp_path / notebook.name
    copy.write_bytes(notebook.read_bytes())
    command = [sys.executable, ROOT / "scripts/run_notebook.py", copy, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(shown(copy))
    assert shown(copy) == shown(notebook)
    assert list(tmp_path.glob("runs/*/report.html"))
