"""The folder of a study: what it is to do, a run folder for every cell, tables, figures and a page.

A finished cell has a record of its sizes beside its run; how much of the run stays is the user's choice.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl_studies.library import (
    Config,
    ConfigError,
    RunFolder,
    __version__,
    load_config,
    read_events,
    summarize,
    write_atomic,
    write_yaml,
)
from fedmtl_studies.options import Keep

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class StudyFolder:
    """Where each part of a study lies; a part need not exist yet."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "study.yaml"

    @property
    def cells(self) -> Path:
        return self.path / "cells"

    @property
    def made(self) -> Path:
        """The notes on how cells were made of others."""
        return self.path / "made"

    @property
    def logs(self) -> Path:
        """What the processes of the cells printed; empty files where all went well."""
        return self.path / "logs"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def page(self) -> Path:
        return self.path / "study.html"

    @property
    def markdown(self) -> Path:
        return self.path / "study.md"

    def cell(self, name: str) -> RunFolder:
        return RunFolder(self.cells / name)


def cell_name(setup: str, seed: int) -> str:
    """Return the name of a setup's cell with that seed, which is its folder's."""
    return f"{setup}-seed{seed}"


def open_study(output: Path, name: str) -> StudyFolder:
    """Return the folder of that name, new or as an earlier call left it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: use letters, digits, `.`, `_` and `-`, and start with a letter or a digit")
    folder = StudyFolder((output / name).absolute())
    if (folder.path / "config.yaml").exists():
        raise ConfigError(f"--name {name}: {folder.path} is a run, not a study; give another name")
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def write_settings(folder: StudyFolder, study: str, options: Mapping[str, Any], at_once: int) -> dict[str, Any]:
    """Write what the study is to do into its folder, and return what was written."""
    about = {"study": study, "version": __version__, **options, "cells_at_once": at_once}
    write_atomic(folder.settings, write_yaml(about).encode())
    return about


def is_done(run: RunFolder) -> bool:
    """Say whether the run came to its end."""
    return summarize(read_events(run)).status == "done"


def find_difference(run: RunFolder, wanted: Config) -> str | None:
    """Return in words the first setting in which a cell's folder differs from the wanted ones; None where none does.

    Where it computes and where it lies do not change what a run comes to.
    """
    return first_difference(*(_deciding(config) for config in (load_config(run.config), wanted)))


def first_difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """Return in words, by its whole key, the first value that differs; None where all are equal."""
    found, wanted = _flat(found), _flat(wanted)
    for key in dict.fromkeys([*found, *wanted]):
        if found.get(key) != wanted.get(key):
            return f"{key} was {found.get(key)} and is now {wanted.get(key)}"
    return None


def _deciding(config: Config) -> dict[str, Any]:
    values = config.model_dump(exclude={"compute", "output"})
    values["data"].pop("cache")
    return values


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    stack: list[tuple[str, object]] = list(values.items())
    while stack:
        path, value = stack.pop(0)
        if isinstance(value, dict) and value:
            stack = [(f"{path}.{key}", inner) for key, inner in value.items()] + stack
        else:
            flat[path] = value
    return flat


def settle(run: RunFolder, at_once: int, keep: Keep) -> None:
    """Record a finished run's sizes, memory and neighbours on the machine, then remove what `keep` does not name."""
    record = record_path(run)
    if not record.exists():
        sizes = {
            "cells_at_once": at_once,
            "trained_bytes": trained_bytes(run.model / _WEIGHTS),
            "model_bytes": sum(path.stat().st_size for path in run.model.rglob("*") if path.is_file()),
            "peak_bytes": read_memory(run),
        }
        write_atomic(record, json.dumps(sizes).encode())
    if keep != "all":
        for part in (run.checkpoints, run.clients):
            shutil.rmtree(part, ignore_errors=True)
    if keep == "scores":
        (run.model / _WEIGHTS).unlink(missing_ok=True)
        for copied in ("encoder", "cut"):
            shutil.rmtree(run.path / copied, ignore_errors=True)


def has_weights(run: RunFolder) -> bool:
    """Say whether another cell can still be made of the run."""
    return (run.model / _WEIGHTS).exists()


def record_path(run: RunFolder) -> Path:
    return run.path / "cell.json"


def memory_path(run: RunFolder) -> Path:
    return run.path / "memory.json"


def read_memory(run: RunFolder) -> int | None:
    """Return the most memory that the cell's process noted; None where there is no note."""
    path = memory_path(run)
    return int(json.loads(path.read_text())) if path.exists() else None


def is_settled(run: RunFolder) -> bool:
    """Say whether the run is finished and its sizes are recorded."""
    return record_path(run).exists()


def read_record(run: RunFolder) -> dict[str, Any]:
    """Return what `settle` recorded; empty where the cell is not finished."""
    path = record_path(run)
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def trained_bytes(weights: Path) -> int:
    """Return the bytes of all trained values: what is stored per model where the fixed ones are there already."""
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        value["data_offsets"][1] - value["data_offsets"][0]
        for name, value in header.items()
        if name != "__metadata__" and name.split("|")[1] != "fixed"
    )
