"""What the setups of every study have in common: names, and settings that are put over others."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

Settings = dict[str, Any]


def fits(setup: str, patterns: str) -> bool:
    """Whether a setup's name fits one of the patterns, such as `lora-*,joint`."""
    return any(fnmatchcase(setup, pattern.strip()) for pattern in patterns.split(","))


def cell_name(setup: str, seed: int) -> str:
    """The name of a setup's cell with that seed, which is its folder's."""
    return f"{setup}-seed{seed}"


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Settings:
    """The first settings with the second put over them, section by section."""
    result = dict(first)
    for key, value in second.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result
