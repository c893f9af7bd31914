"""A config is a YAML file or a mapping, which is read, checked and written here, and of which every key is described.

Overrides of `--set` are applied as it is read, and relative paths become absolute ones.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmtl.config import Config
from fedmtl.config.auto import Choice, choose, commented, origins, with_choices
from fedmtl.config.errors import dotted, shown, to_config_error
from fedmtl.config.schema import MOVED, with_moved_keys
from fedmtl.config.yaml_text import DEEPEST, LARGEST_TEXT, parse_yaml, write_yaml
from fedmtl.errors import ConfigError

_FILES = [
    ("data", "root"),
    ("data", "cache"),
    ("tasks", "*", "source", "train"),
    ("tasks", "*", "source", "validation"),
    ("tasks", "*", "source", "test"),
    ("tasks", "*", "source", "more_validation", "*"),
    ("clients", "*", "source", "*"),
    ("clients", "*", "source", "*", "train"),
    ("clients", "*", "source", "*", "validation"),
    ("clients", "*", "source", "*", "test"),
    ("model", "start_from"),
    ("training", "distillation", "teacher"),
    ("training", "distillation", "texts", "*"),
]
_MODELS = [("model", "server_model"), ("model", "client_model")]
AGGREGATION = ["federation", "aggregation"]
# No key lies deeper, and whoever walks a deeper mapping runs out of stack.
MOST_PARTS = 32

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None


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


def load_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    """Load and check a config, with `path.to.key=value` overrides on top; a mistake is a ConfigError of one line.

    The source is the path of a YAML file, a mapping with the same sections and keys, a Config, or None for an empty
    config. Relative paths in a file are relative to that file; those in a mapping or in overrides, and `output`, are
    relative to the working directory. Settings that are not given are chosen by the rules of `config.auto`; a Config
    gives all of them.
    """
    return explained_config(source, overrides).config


@dataclass(frozen=True)
class Explained:
    """A config with what was given of it, unchecked, and what was chosen for the rest."""

    config: Config
    given: Mapping[str, Any]
    choices: tuple[Choice, ...]

    @property
    def follows_examples(self) -> bool:
        """Whether the number of examples of every task may choose other settings."""
        chosen = {choice.key: choice.value for choice in self.choices}
        most = dict.fromkeys(self.config.tasks, sys.maxsize)
        return chosen != {choice.key: choice.value for choice in self.with_examples(most).choices}

    def with_examples(self, examples: Mapping[str, int]) -> Explained:
        """The same config with settings that follow the number of training examples of every task."""
        if not self.choices:
            return self
        return _explained(self.given, examples)

    def commented(self) -> str:
        """The whole config as YAML, with `# given` or the card or rule that chose it behind a value."""
        plain = dump_config(self.config)
        words = commented(plain, origins(self.config, self.given, self.choices))
        # A name of a task may be anything that YAML quotes: better no comments than another config.
        return words if parse_yaml(words, where="config") == parse_yaml(plain, where="config") else plain


def explained_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Explained:
    """Load a config as `load_config` does, and say where its values come from."""
    given = with_overrides(_unchecked(source), overrides)
    # Mistakes are named as they were written.
    config_from(given)
    if isinstance(given.get("federation"), Mapping):
        given["federation"] = with_moved_keys(given["federation"])
    return _explained(given)


def _explained(given: Mapping[str, Any], examples: Mapping[str, int] | None = None) -> Explained:
    config = config_from(dict(given))
    choices = choose(config, given, examples)
    return Explained(config_from(with_choices(given, choices)) if choices else config, given, choices)


def demo_config(overrides: Sequence[str] = ()) -> Config:
    """Load the packaged demonstration: three tasks, six clients, embedded data, and the encoder in the package."""
    return explained_demo(overrides).config


def explained_demo(overrides: Sequence[str] = ()) -> Explained:
    """The packaged demonstration, with where its values come from.

    Its rate and its way of encoding are those of its encoder: with another one, rules choose them.
    """
    with as_file(files("fedmtl") / "demo.yaml") as demo:
        raw = _read(demo)
    changed = with_overrides(raw, overrides)
    # What is no section is an error of the config, which is named below.
    before, after = raw["model"], changed.get("model")
    if isinstance(after, dict) and any(after.get(key) != before.get(key) for key in _ENCODER):
        raw = {key: value for key, value in raw.items() if key != "defaults"}
        raw["model"] = {key: value for key, value in before.items() if key in _ENCODER}
        raw["training"] = {key: value for key, value in raw["training"].items() if key != "learning_rate"}
    return explained_config(raw, overrides)


# What decides which encoder a run begins with.
_ENCODER = ("server_model", "client_model", "initial", "start_from")


def _unchecked(source: ConfigSource) -> dict[str, Any]:
    """The sections of any source in YAML's types, with absolute paths."""
    if source is None:
        return {}
    if isinstance(source, Config):
        return source.model_dump()
    if isinstance(source, Mapping):
        plain: dict[str, Any] = _plain(source, ())
        return with_absolute_paths(plain, Path.cwd())
    if isinstance(source, str | os.PathLike):
        return _read(Path(source))
    raise ConfigError(f"config: found {shown(source)}; give the path of a YAML file, or a mapping of its sections")


def _plain(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of what Python code wrote in the types that YAML gives: dicts, lists, and texts for paths."""
    if len(path) > DEEPEST:
        raise ConfigError(f"{dotted(path[:4])}...: is nested deeper than {DEEPEST}; write it flatter")
    if isinstance(value, Mapping):
        return {key: _plain(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, number)) for number, inner in enumerate(value)]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def with_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of an unchecked config with `path.to.key=value` overrides put in."""
    if isinstance(overrides, str | bytes):
        raise ConfigError(f"overrides: found the text {shown(overrides)}; give a list of them, such as [{overrides!r}]")
    changed = copy.deepcopy(dict(raw))
    # A key that has moved is set where it is now; what the config has under its old name would contradict it there.
    if overrides and isinstance(changed.get("federation"), Mapping):
        changed["federation"] = with_moved_keys(changed["federation"])
    for override in overrides:
        _set(changed, override)
    return changed


def config_from(raw: dict[str, Any]) -> Config:
    """The checked config of a mapping as YAML gives it; its paths are absolute already."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise to_config_error(error, raw, Config) from error


def dump_config(config: Config) -> str:
    """Return the whole config as YAML with every default filled in; a file of it loads as an equal config."""
    return write_yaml(config.model_dump())


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config file, with every key's description and default."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _read(path: Path) -> dict[str, Any]:
    try:
        path = path.expanduser()
        with path.open(encoding="utf-8-sig") as file:
            # One letter more than may be there: the parser says so, without reading a file of any size.
            text = file.read(LARGEST_TEXT + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a config in YAML") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (ValueError, RuntimeError) as error:  # a null in the name, a user without a home folder
        raise ConfigError(f"{str(path)!r}: cannot be read ({error}); give the path of a YAML file") from None
    raw = parse_yaml(text, where=str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: found {shown(raw)}, a config is sections of `key: value` lines")
    return with_absolute_paths(raw, path.parent.absolute())


def _set(raw: dict[str, Any], override: str) -> None:
    """Put one `path.to.key=value` into the mapping; sections on the way are made where missing."""
    name, equals, text = override.partition("=")
    parts = [*MOVED.get(tuple(name.strip().split(".")), name.strip().split("."))]
    if not equals or not all(parts) or len(parts) > MOST_PARTS:
        raise ConfigError(f"--set {override}: write `--set path.to.key=value`, such as training.num_rounds=3")
    value = parse_yaml(text, where=f"--set {override}")
    for part in reversed(parts):
        value = {part: value}
    value = with_absolute_paths(value, Path.cwd())
    section = raw
    for depth, part in enumerate(parts[:-1], start=1):
        key = _key_in(section, part)
        if section.get(key) is None:
            section[key] = {}
        if parts[:depth] == AGGREGATION and isinstance(section[key], str):
            section[key] = {"rule": section[key]}
        section, value = section[key], value[part]
        if not isinstance(section, dict):
            raise ConfigError(
                f"--set {override}: {dotted(parts[:depth])} is {shown(section)}, without keys; set all of it"
            )
    key = _key_in(section, parts[-1])
    if parts == AGGREGATION and isinstance(value[parts[-1]], str) and isinstance(section.get(key), dict):
        # A name by itself is the rule, and leaves the other settings as they are.
        section, key, value = section[key], "rule", {parts[-1]: value[parts[-1]]}
    section[key] = value[parts[-1]]


def _key_in(section: dict[Any, Any], part: str) -> Any:
    # A client called 1 is a number in YAML and a text in `--set`.
    return next((key for key in section if str(key) == part), part)
