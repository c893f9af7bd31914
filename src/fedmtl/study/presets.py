"""Presets of studies: files in the package that hold what a command does unless told otherwise."""

from __future__ import annotations

from importlib.resources import files

from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError
from fedmtl.study.rates import Rates
from fedmtl.study.setups import Settings


def read_preset(study: str, name: str) -> Settings:
    """What stands in a study's preset of that name."""
    place = files(f"fedmtl.study.{study}") / "presets" / f"{name}.yaml"
    found: Settings = parse_yaml(place.read_text(encoding="utf-8"), f"{name}.yaml")
    return found


def preset_rates(found: Settings) -> Rates:
    """The learning rates by name that a preset has, in its order."""
    return tuple((name, float(rate)) for name, rate in found.get("rates", {}).items())


def refuse_both(preset: str | None, *, quick: bool) -> None:
    """Raise a ConfigError for a preset beside --quick."""
    if quick and preset is not None:
        raise ConfigError(f"--preset {preset}: --quick has settings of its own; leave one of them out")
