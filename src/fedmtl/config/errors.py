"""What is wrong with a config, as one line: the key's full path, what was found and what would be right.

A rule over several keys is a validator of the section that has them all, and raises a `WrongKey`.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedmtl.errors import ConfigError

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "a text (put quotes around it)",
    "bool": "true or false",
    "dict": "a section of `key: value` lines",
    "model": "a section of `key: value` lines",
    "list": "a list, such as [a, b]",
    "tuple": "a list, such as [a, b]",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
# In the words of a WrongKey, what stands for the path of its section and the dot behind it.
HERE = "{here}."


class WrongKey(ValueError):
    """A key breaks a rule that a validator of its section, or of its field, knows.

    `key` is the path from there on, empty for the section or the field itself; `words` say what was found and what
    would be right. A section does not know its path in the config: `HERE` in front of a name in `words` stands for it.
    """

    def __init__(self, key: str, words: str) -> None:
        super().__init__((f"{key}: {words}" if key else words).replace(HERE, ""))
        self.key, self.words = key, words


def to_config_error(error: ValidationError, raw: Mapping[str, Any], section: type[BaseModel]) -> ConfigError:
    """The first mistake in `raw`, which `section` refused, with how many more there are."""
    mistakes: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        mistakes.setdefault(_path(details, raw), []).append(details)
    # A value that fits no member of a union is reported once per member; the deepest says most.
    paths = [p for p in mistakes if not any(q != p and q[: len(p)] == p for q in mistakes)]
    # A mistyped key is why another one is missing.
    paths.sort(key=lambda p: mistakes[p][0]["type"] != "extra_forbidden")
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return ConfigError(f"{dotted(paths[0])}: {_explain(paths[0], mistakes[paths[0]], section)}{more}")


def dotted(path: Sequence[Any]) -> str:
    """A key's full path as the user writes it after `--set`."""
    return ".".join(" ".join(str(part).split()) for part in path) or "the config"


def shown(value: Any) -> str:
    """A value as it may stand in a one-line message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: Any, known: Sequence[str]) -> str:
    """A sentence with the known word that is nearest, or with all of them where none is near."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"it is one of {', '.join(known)}"


def _path(details: ErrorDetails, raw: Any) -> tuple[Any, ...]:
    """The keys of an error's location, without the union members pydantic puts between them."""
    path: list[Any] = []
    here = raw
    location = details["loc"]
    for depth, part in enumerate(location):
        is_missing_key = details["type"] == "missing" and depth == len(location) - 1
        if isinstance(here, Mapping) and part in here:
            here = here[part]
        elif isinstance(here, Mapping) and (key := _same_text(part, here)) is not None:
            here = here[key]
        elif isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
            here = here[part]
        elif not is_missing_key:
            continue
        path.append(part)
    wrong = _wrong_key(details)
    return (*path, wrong.key) if wrong and wrong.key else tuple(path)


def _wrong_key(details: ErrorDetails) -> WrongKey | None:
    error = details.get("ctx", {}).get("error")
    return error if isinstance(error, WrongKey) else None


def _same_text(part: Any, mapping: Mapping[Any, Any]) -> Any:
    return next((key for key in mapping if str(key) == str(part)), None)


def _explain(path: tuple[Any, ...], mistakes: Sequence[ErrorDetails], section: type[BaseModel]) -> str:
    kind, found = mistakes[0]["type"], mistakes[0]["input"]
    if wrong := _wrong_key(mistakes[0]):
        here = path[:-1] if wrong.key else path
        return wrong.words.replace(HERE, f"{dotted(here)}." if here else "")
    if kind == "extra_forbidden":
        return f"unknown key; {_near_key(path, section)}"
    if kind == "missing" or (path == ("tasks",) and not found):
        return _missing(path, section)
    if kind == "value_error" and isinstance(found, Mapping):
        return str(mistakes[0]["ctx"]["error"])
    wanted = ", or ".join(dict.fromkeys(map(_wanted, mistakes)))
    near = difflib.get_close_matches(str(found), _quoted(wanted), n=1)
    return f"found {shown(found)}, it must be {wanted}" + (f"; did you mean `{near[0]}`?" if near else "")


def _wanted(mistake: ErrorDetails) -> str:
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"{words} {context[key]:g}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    if kind == "value_error":
        return str(context["error"])
    return _KINDS.get(kind.split("_")[0], mistake["msg"])


def _quoted(words: str) -> list[str]:
    return words.split("'")[1::2]


def _missing(path: tuple[Any, ...], section: type[BaseModel]) -> str:
    if path == ("tasks",):
        return "missing; name at least one task, such as `tasks: {sst2: {}}`"
    if isinstance(path[-1], int):
        return "missing; write two values, such as [0, 5]"
    around = _annotation(path[:-1], section)
    words = around.model_fields[path[-1]].description if _is_section(around) else None
    return f"missing; {words}" if words else "missing"


def _near_key(path: tuple[Any, ...], section: type[BaseModel]) -> str:
    around = _annotation(path[:-1], section)
    known = [*around.model_fields, *getattr(around, "also_read", ())] if _is_section(around) else []
    if not difflib.get_close_matches(str(path[-1]), known, n=1):
        elsewhere = [f"{name}.{path[-1]}" for name in _sections_with(path[-1], section)]
        if elsewhere:
            return f"did you mean `{elsewhere[0]}`?"
    return did_you_mean(path[-1], known)


def _sections_with(key: Any, section: type[BaseModel]) -> list[str]:
    fields = {name: _annotation((name,), section) for name in section.model_fields}
    return [name for name, kind in fields.items() if _is_section(kind) and key in kind.model_fields]


def _annotation(path: Sequence[Any], section: type[BaseModel]) -> Any:
    """The type that a section declares at a path, or None."""
    here: Any = section
    for part in path:
        if _is_section(here):
            field = here.model_fields.get(part)
            here = field.annotation if field else None
        elif typing.get_origin(here) is dict:
            here = typing.get_args(here)[1]
        else:
            return None
        here = _of_union(here)
    return here


def _of_union(kind: Any) -> Any:
    members = [m for m in typing.get_args(kind) if m is not type(None)]
    sections = [m for m in members if _is_section(m)]
    if typing.get_origin(kind) is dict or not sections:
        return kind
    return sections[0]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
