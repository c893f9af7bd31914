"""What a setting may hold: numbers as people write them in YAML, and sections that refuse what they do not know."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedmtl.config.errors import WrongKey, shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _number(value: Any) -> Any:
    # PyYAML follows YAML 1.1, where `2e-5` is a string; everybody who writes it means a number.
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _whole(value: Any) -> Any:
    number = _number(value)
    # Text goes to pydantic as it is where it can: a float would round a long seed.
    return int(number) if isinstance(number, float) and number.is_integer() and not _digits(value) else value


def _digits(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lstrip("+-").isdigit()


def _text(value: Any) -> Any:
    # A column by its number.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _several(value: Any) -> Any:
    # `text: message` says as much as `text: [message]`.
    return list(map(_text, value if isinstance(value, list) else [value])) if value is not None else None


def _section(value: Any) -> Any:
    # `sst2:` with nothing behind it is null in YAML and means that every default holds.
    return {} if value is None else value


# The validators come last, so that the JSON schema shows the bounds.
AsNumber = BeforeValidator(_number)
AsWhole = BeforeValidator(_whole)
Number = Annotated[float, Field(allow_inf_nan=False), AsNumber]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AsNumber]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), AsNumber]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), AsNumber]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), AsNumber]
Cosine = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False), AsNumber]
Minority = Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False), AsNumber]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), AsNumber]
Whole = Annotated[int, Field(ge=0), AsWhole]
Count = Annotated[int, Field(ge=1), AsWhole]
Name = Annotated[str, Field(coerce_numbers_to_str=True)]
Empty = BeforeValidator(_section)
AsText = BeforeValidator(_text)
OneOrSeveral = BeforeValidator(_several)


class Section(BaseModel):
    """A part of the config: unknown keys are errors, values never change after loading.

    `also_read` are keys of an earlier version that a validator of the section still takes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    also_read: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _all_defaults(cls, value: Any) -> Any:
        return _section(value)


def check_names(names: Iterable[str], key: str = "") -> None:
    """Raise a WrongKey for a name that would break a scope, a parameter's name, a file's name or a `--set` path."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise WrongKey(
                key,
                f"found the name {shown(name)}; use letters from a to z, digits, `_` and `-`,"
                " 64 at most, and begin with a letter or a digit",
            )


def first_repeated(words: Iterable[str]) -> str | None:
    """The first word that stands there a second time."""
    seen: set[str] = set()
    for word in words:
        if word in seen:
            return word
        seen.add(word)
    return None
