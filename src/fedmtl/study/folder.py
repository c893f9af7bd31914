"""The folder of a study: what was asked, a run folder for every cell, tables, figures and a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl import __version__
from fedmtl.config import Config
from fedmtl.config.file import load_config
from fedmtl.config.yaml_text import write_yaml
from fedmtl.errors import ConfigError
from fedmtl.runs.folder import RunFolder, read_events, write_atomic
from fedmtl.runs.summary import summarize

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class StudyFolder:
    """Where each part of a study lies; a part need not exist yet."""

    path: Path

    @property
    def asked(self) -> Path:
        return self.path / "study.yaml"

    @property
    def cells(self) -> Path:
        return self.path / "cells"

    @property
    def made(self) -> Path:
        """Of every cell that is made of another one, how."""
        return self.path / "made"

    @property
    def logs(self) -> Path:
        """What the processes of the cells said; empty files where all went well."""
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


def open_study(output: Path, name: str) -> StudyFolder:
    """The folder of that name, new or as an earlier call left it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: use letters, digits, `.`, `_` and `-`, and start with a letter or a digit")
    folder = StudyFolder((output / name).absolute())
    if (folder.path / "config.yaml").exists():
        raise ConfigError(f"--name {name}: {folder.path} is a run, not a study; give another name")
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def note_asked(folder: StudyFolder, study: str, asked: Mapping[str, Any], at_once: int) -> dict[str, Any]:
    """Write what is asked of the study into its folder; gives what was written."""
    about = {"study": study, "version": __version__, **asked, "cells_at_once": at_once}
    write_atomic(folder.asked, write_yaml(about).encode())
    return about


def is_done(run: RunFolder) -> bool:
    """Whether the run came to its end."""
    return summarize(read_events(run)).status == "done"


def find_difference(run: RunFolder, wanted: Config) -> str | None:
    """The first setting in which a cell's folder differs from what is asked now, in words; None where none does.

    Where it computes and where it lies do not change what a run comes to.
    """
    return first_difference(*(_deciding(config) for config in (load_config(run.config), wanted)))


def first_difference(found: Mapping[str, object], asked: Mapping[str, object]) -> str | None:
    """In words, by the whole key of a value; None where all are equal."""
    found, asked = _flat(found), _flat(asked)
    for key in dict.fromkeys([*found, *asked]):
        if found.get(key) != asked.get(key):
            return f"{key} was {found.get(key)} and is now {asked.get(key)}"
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
