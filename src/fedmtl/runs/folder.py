"""A run folder has fixed files, as docs/run-folder.md lays down; a run is found by its name or its folder."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from fedmtl.errors import FedmtlError, RunNotFound
from fedmtl.runs.files import storage_error

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RunFolder:
    """Where each part of one run lies; a part need not exist yet."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.csv"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def clients(self) -> Path:
        return self.path / "clients"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def spool(self) -> Path:
        """Encoded updates of the open round; empty between rounds."""
        return self.path / "spool"


def create_run(output: Path, name: str) -> RunFolder:
    """A new, empty folder of that name, or of name-2, name-3, ... where it is taken; never an old one.

    Only its owner may open it: it will hold weights, and what sites said.
    """
    if not _NAME.fullmatch(name):
        raise FedmtlError(
            f"run name {name[:120]!r}: use letters, digits, `.`, `_` and `-`, 100 at most, and start with a letter"
            " or a digit"
        )
    path, number = output / name, 1
    try:
        output.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir(mode=0o700)
                return RunFolder(path)
            except FileExistsError:
                number += 1
                path = output / f"{name}-{number}"
    except OSError as error:
        raise storage_error(error, output) from error


def find_run(name_or_folder: str, output: Path = Path("runs")) -> RunFolder:
    """The run of that name under `output`, or in that folder."""
    for path in (output / name_or_folder, _expanded(name_or_folder)):
        if _is_run(path):
            return RunFolder(path)
    if not output.is_dir():
        raise RunNotFound(f"{name_or_folder}: no such run, and no folder {output}; start one with `fedmtl run`")
    known = sorted(path.name for path in output.iterdir() if _is_run(path))
    near = difflib.get_close_matches(name_or_folder, known, n=3)
    if near:
        raise RunNotFound(f"{name_or_folder}: no such run in {output}; did you mean {' or '.join(near)}?")
    listed = f"it has {', '.join(known[:10])}{', ...' if len(known) > 10 else ''}" if known else "it has none"
    raise RunNotFound(f"{name_or_folder}: no such run in {output}, {listed}; give a name or a run folder")


def _expanded(name: str) -> Path:
    """The path with `~` replaced; it stays where that user has no home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "events.jsonl").is_file()
