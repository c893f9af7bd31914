"""Presets of studies: files in the package that hold what a command does unless told otherwise."""

from __future__ import annotations

from importlib.resources import files

from fedmtl.config.yaml_text import parse_yaml
from fedmtl.study.setups import Settings


def read_preset(study: str, name: str) -> Settings:
    """What stands in a study's preset of that name."""
    place = files(f"fedmtl.study.{study}") / "presets" / f"{name}.yaml"
    found: Settings = parse_yaml(place.read_text(encoding="utf-8"), f"{name}.yaml")
    return found
