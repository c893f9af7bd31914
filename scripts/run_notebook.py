"""Execute the code cells of a notebook in one namespace, and write what they print and show back into it.

    python scripts/run_notebook.py examples/quickstart.ipynb --folder /tmp/here

It needs no Jupyter. Files that cells write land in `--folder`, by default the working directory.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of a fresh execution; an exception in a cell is the caller's."""
    # Not `__main__`: worker processes would look for it in a file.
    names: dict[str, Any] = {"__name__": "notebook"}
    count = 0
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _run("".join(cell["source"]), names, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _run(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell prints, and the value of an expression that ends it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {count}>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {count}>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        shown = {"text/plain": _lines(repr(value))}
        outputs.append({"data": shown, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute a notebook and write its outputs into it.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(), help="Where the cells run.")
    given = parser.parse_args()
    path = given.notebook.resolve()
    os.chdir(given.folder)
    done = execute(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
