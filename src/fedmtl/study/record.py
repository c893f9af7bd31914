"""What is noted of a finished cell beside its run, and what of its folder is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from fedmtl.runs.folder import RunFolder, write_atomic

Keep = Literal["all", "models", "scores"]
_WEIGHTS = "weights.safetensors"


def settle(run: RunFolder, at_once: int, keep: Keep) -> None:
    """Note a finished run's sizes and how many cells shared the machine, then remove what `keep` does not name."""
    record = record_path(run)
    if not record.exists():
        noted = {
            "cells_at_once": at_once,
            "trained_bytes": trained_bytes(run.model / _WEIGHTS),
            "model_bytes": sum(path.stat().st_size for path in run.model.rglob("*") if path.is_file()),
        }
        write_atomic(record, json.dumps(noted).encode())
    if keep != "all":
        for part in (run.checkpoints, run.clients):
            shutil.rmtree(part, ignore_errors=True)
    if keep == "scores":
        (run.model / _WEIGHTS).unlink(missing_ok=True)
        for copied in ("encoder", "cut"):
            shutil.rmtree(run.path / copied, ignore_errors=True)


def has_weights(run: RunFolder) -> bool:
    """Whether another cell can still be made of it."""
    return (run.model / _WEIGHTS).exists()


def record_path(run: RunFolder) -> Path:
    return run.path / "cell.json"


def is_settled(run: RunFolder) -> bool:
    """Whether the run is finished and its sizes are noted."""
    return record_path(run).exists()


def read_record(run: RunFolder) -> dict[str, Any]:
    """What `settle` noted; empty where the cell is not finished."""
    path = record_path(run)
    noted: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return noted


def trained_bytes(weights: Path) -> int:
    """Bytes of all values that were trained: what must be stored per model where the fixed ones are there already."""
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        place["data_offsets"][1] - place["data_offsets"][0]
        for name, place in header.items()
        if name != "__metadata__" and name.split("|")[1] != "fixed"
    )
