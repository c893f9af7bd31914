"""Which config keys are paths, and what they are relative to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedmtl.errors import ConfigError

_FILES = [
    ("data", "root"),
    ("data", "cache"),
    ("tasks", "*", "source", "train"),
    ("tasks", "*", "source", "validation"),
    ("clients", "*", "source", "*"),
    ("clients", "*", "source", "*", "train"),
    ("clients", "*", "source", "*", "validation"),
    ("model", "start_from"),
    ("training", "distillation", "teacher"),
    ("training", "distillation", "texts", "*"),
]
_MODELS = [("model", "server_model"), ("model", "client_model")]


def with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of an unchecked config in which paths are absolute, relative ones taken from `folder`.

    An encoder is a path where it starts like one or is a folder there; else it is a hub's name.
    """
    return {key: _resolve(value, (key,), folder) for key, value in raw.items()}


def _resolve(value: Any, path: tuple[Any, ...], folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(inner, (*path, key), folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, (*path, number), folder) for number, inner in enumerate(value)]
    if not isinstance(value, str) or not value:
        return value
    if any(_matches(path, pattern) for pattern in _FILES) or (path in _MODELS and _is_path(value, folder)):
        # normpath, not resolve: a link the user named stays named.
        return os.path.normpath(folder / expand(value, path))
    return str(expand(value, path)) if path == ("output",) else value


def _matches(path: tuple[Any, ...], pattern: tuple[str, ...]) -> bool:
    return len(path) == len(pattern) and all(want in ("*", part) for part, want in zip(path, pattern, strict=True))


def _is_path(value: str, folder: Path) -> bool:
    return value in (".", "..") or value.startswith(("./", "../", "/", "~")) or (folder / value).is_dir()


def expand(value: str, path: tuple[Any, ...]) -> Path:
    """A file's name with `~` replaced; one that no file can have is a ConfigError that names the key."""
    if "\0" in value:
        raise ConfigError(f"{'.'.join(map(str, path))}: found {value!r}, no file's name has a null in it")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(f"{'.'.join(map(str, path))}: found {value!r}, that user has no home folder") from None
