"""The options of a study: records from which the commands are made, and the ways in which their values are written.

A field of an options record with an `Option` is an option of the study's command. The record itself puts what was given
over what `--quick` or a preset says, so that one that exists is whole, whoever made it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, model_validator

from fedmtl_studies.library import ConfigError, parse_yaml

Settings = dict[str, Any]
# Patterns of names, each with a learning rate; the last that fits counts.
Rates = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Option:
    """How a field is written on the command line: its flag, its help, and how its text is read.

    `read` makes the value of what typer gives (a `kind`) and the flag, which errors name; `each` does so for every one
    of an option that may be given several times. `has_default` is False where the default depends on other options: the
    command line then leaves the field out unless it is given. `choices` are those of a Literal that may be written.
    """

    flag: str
    help: str
    metavar: str | None = None
    least: int | None = None
    kind: type = str
    read: Callable[[Any, str], Any] | None = None
    each: Callable[[str], Any] | None = None
    has_default: bool = True
    choices: tuple[str, ...] = ()


def data_option(help: str) -> Option:
    """Return the option of the folder with the data."""
    return Option("--data", help, kind=Path, read=path_text)


def number_option(flag: str, help: str, metavar: str = "N", least: int | None = 1) -> Option:
    """Return an option for a number whose default depends on other options."""
    return Option(flag, help, metavar, None if metavar == "X" else least, has_default=False)


def list_option(flag: str, help: str, read: Callable[[str, str], Any], metavar: str | None = None) -> Option:
    """Return an option for values with commas between, whose default depends on other options."""
    return Option(flag, help, metavar, read=read, has_default=False)


class StudyOptions(BaseModel, ABC):
    """What a study is to do; all of it stands in study.yaml, but for fields that are excluded there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What replaces the defaults of fields in a miniature.
    miniature: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def complete(cls, given: Settings) -> Settings:
        """Return the given values over those that `--quick` or a preset replaces defaults with."""
        return {**cls.miniature, **given} if given.get("quick") else given

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Settings) -> Settings:
        return cls.complete({name: value for name, value in given.items() if value is not None})

    @property
    @abstractmethod
    def folder_name(self) -> str:
        """The name of the study's folder where none was given."""


Keep = Literal["all", "models", "scores"]


class GridOptions(BaseModel):
    """How the cells of a study are run, and where; none of it changes a result."""

    jobs: Annotated[
        int | None,
        Option("--jobs", "Cells at once; empty is what suits the machine.", metavar="N", least=1, kind=int),
    ] = None
    keep: Annotated[
        Keep,
        Option("--keep", "What stays of a finished cell: checkpoints too (all), its model, or its scores alone."),
    ] = "models"
    name: Annotated[str | None, Option("--name", "The study's folder in runs/; one that is there goes on.")] = None


def path_text(path: Path, flag: str) -> str:
    """Return a path as it was written."""
    return str(path)


def read_whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return `0,1,2` as numbers, each once; the error names the flag."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ConfigError(f"{flag}: found {text}; write whole numbers with commas between, such as 0,1,2") from None


def read_numbers(text: str, flag: str) -> tuple[float, ...]:
    """Return `5,0.5` as numbers above 0, each once; the error names the flag."""
    return tuple(dict.fromkeys(_number(part, text, flag) for part in text.split(",") if part.strip()))


def read_names(text: str, flag: str) -> tuple[str, ...]:
    """Return `a,b` as its parts, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def read_rates(text: str, flag: str) -> Rates:
    """Return `federated*=4e-4,local=1e-4` as patterns and learning rates."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not sign or not name.strip() for name, sign, _ in pairs):
        raise ConfigError(f"{flag}: found {text}; write NAME=X with commas between, such as local=1e-4,tiny-*=2e-4")
    return tuple((name.strip(), _number(rate, text, flag)) for name, _, rate in pairs)


def _number(part: str, text: str, flag: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag}: found {text}; write numbers above 0 with commas between, such as 4e-4")
    return value


Quick = Annotated[bool, Option("--quick", "The whole grid in miniature, on embedded data, in some minutes.")]
Rows = Annotated[str, Option("--rows", "Only setups whose names fit, such as 'joint*,epoch'.", metavar="PATTERNS")]
Overrides = Annotated[
    tuple[str, ...], Option("--set", "Replace a setting that the rows have in common.", metavar="KEY=VALUE")
]


class Seeded(Protocol):
    """Options that say which setups run with all seeds."""

    @property
    def seeds(self) -> tuple[int, ...]: ...
    @property
    def seed_rows(self) -> str: ...


def seeds_of(options: Seeded, *names: str) -> tuple[int, ...]:
    """Return all seeds where one of the names fits `seed_rows`, else the first seed alone."""
    return options.seeds if any(fits(name, options.seed_rows) for name in names) else options.seeds[:1]


def fits(setup: str, patterns: str) -> bool:
    """Say whether a setup's name fits one of the patterns, such as `lora-*,joint`."""
    return any(fnmatchcase(setup, pattern.strip()) for pattern in patterns.split(","))


def rate_for(known: Rates, *names: str) -> float | None:
    """Return the learning rate that was given for one of the names; None where none was."""
    given = [rate for pattern, rate in known if any(fits(name, pattern) for name in names)]
    return given[-1] if given else None


def check_seeds(seeds: Collection[int]) -> None:
    """Raise a ConfigError where there are no seeds."""
    if not seeds:
        raise ConfigError("--seeds: found none; write such as 0,1,2")


def check_tables(tables: Collection[int], known: Collection[int]) -> None:
    """Raise a ConfigError where there are no tables, or one that the study does not have."""
    unknown = [number for number in tables if number not in known]
    if unknown or not tables:
        found = ", ".join(map(str, unknown)) or "none"
        raise ConfigError(f"--tables: found {found}; write some of {min(known)} to {max(known)}")


def read_preset(study: str, name: str) -> Settings:
    """Return what stands in a study's preset of that name."""
    file = files("fedmtl_studies") / "presets" / f"{study}-{name}.yaml"
    found: Settings = parse_yaml(file.read_text(encoding="utf-8"), f"{name}.yaml")
    return found


def preset_rates(found: Settings) -> Rates:
    """Return the learning rates by name that a preset has, in its order."""
    return tuple((name, float(rate)) for name, rate in found.get("rates", {}).items())


def refuse_both(preset: str | None, *, quick: bool) -> None:
    """Raise a ConfigError for a preset beside --quick."""
    if quick and preset is not None:
        raise ConfigError(f"--preset {preset}: --quick has settings of its own; leave one of them out")


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Settings:
    """Return the first settings with the second put over them, section by section."""
    result = dict(first)
    for key, value in second.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result
