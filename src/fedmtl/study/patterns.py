"""Which setups of a study a person names, such as `lora-*,joint`."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(setup: str, patterns: str) -> bool:
    """Whether a setup's name fits one of the patterns, which have commas between."""
    return any(fnmatchcase(setup, pattern.strip()) for pattern in patterns.split(","))
