"""What every study has in common: names of setups and cells, settings put over others, checks of what is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fedmtl.errors import ConfigError

Settings = dict[str, Any]


def fits(setup: str, patterns: str) -> bool:
    """Whether a setup's name fits one of the patterns, such as `lora-*,joint`."""
    return any(fnmatchcase(setup, pattern.strip()) for pattern in patterns.split(","))


def cell_name(setup: str, seed: int) -> str:
    """The name of a setup's cell with that seed, which is its folder's."""
    return f"{setup}-seed{seed}"


def given_over(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """The defaults, with what was given in their place: None is not given."""
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def check_seeds(seeds: Collection[int]) -> None:
    """Raise a ConfigError where there are none."""
    if not seeds:
        raise ConfigError("--seeds: found none; write such as 0,1,2")


def check_tables(tables: Collection[int], known: Collection[int]) -> None:
    """Raise a ConfigError where there are none, or one that the study has not."""
    unknown = [number for number in tables if number not in known]
    if unknown or not tables:
        found = ", ".join(map(str, unknown)) or "none"
        raise ConfigError(f"--tables: found {found}; write some of {min(known)} to {max(known)}")


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Settings:
    """The first settings with the second put over them, section by section."""
    result = dict(first)
    for key, value in second.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result
