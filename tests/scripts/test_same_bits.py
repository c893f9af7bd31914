"""The configs that two trees are compared by use all that the config schema has."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel

from fedmtl.config import Config
from fedmtl.config.file import load_config
from same_bits_runs import WAYS, read_cases

Leaf = tuple[str, Any]

# What no config uses, and why.
LEFT_OUT = {
    "data.source": {"hub": "needs the network"},
    "compute.device": "the bits of a GPU are not those of a CPU",
    "output": "where the runs lie, not what they come to",
    "federation.round_timeout": "a client that is too slow is no repeatable result",
    "federation.join_timeout": "as round_timeout",
    "wire.max_bytes": "refuses a run, and changes none",
}
NETWORK = ("hub", "subset", "train_split", "validation_split")


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, Config]:
    base, cases = read_cases()
    path = tmp_path_factory.mktemp("base") / "base.yaml"
    path.write_text(yaml.safe_dump(base))
    return {case.name: load_config(path, case.overrides()) for case in cases}


def sections(kind: Any) -> list[type[BaseModel]]:
    """The sections inside a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [found for part in typing.get_args(kind) for found in sections(part)]


def choices(kind: Any) -> set[Any]:
    """The literal values inside a type; both of a boolean."""
    if kind is bool:
        return {True, False}
    if typing.get_origin(kind) is Literal:
        return set(typing.get_args(kind))
    if typing.get_origin(kind) in (list, tuple, dict):
        return set()
    return {value for part in typing.get_args(kind) for value in choices(part)}


def fields(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every key that is no section: its path with `*` for names, its type and its default."""
    for name, field in section.model_fields.items():
        inner = sections(field.annotation)
        is_named = typing.get_origin(field.annotation) is dict
        here = f"{path}{name}.*." if is_named else f"{path}{name}."
        if not inner:
            yield f"{path}{name}", field.annotation, field.get_default(call_default_factory=True)
        for each in inner:
            yield from fields(each, here)


def values(section: BaseModel, path: str = "") -> Iterator[Leaf]:
    """Every key of a config that is no section, with its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        named = value.values() if isinstance(value, dict) else []
        inner = [each for each in (value, *named) if isinstance(each, BaseModel)]
        here = f"{path}{name}." if isinstance(value, BaseModel) else f"{path}{name}.*."
        for each in inner:
            yield from values(each, here)
        if not inner:
            yield f"{path}{name}", value


def test_there_are_at_least_thirty_configs_with_names_of_their_own():
    _, cases = read_cases()
    names = [case.name for case in cases]
    assert len(names) >= 30
    assert len(set(names)) == len(names)
    assert {case.how for case in cases} == set(WAYS)
    # A config that needs another comes after it.
    assert all(names.index(case.needs) < names.index(case.name) for case in cases if case.needs)


def test_every_choice_of_the_schema_is_in_a_config(configs):
    leaves = [leaf for config in configs.values() for leaf in values(config)]
    used = {(path, value) for path, value in leaves if isinstance(value, str | int)}
    for path, kind, _ in fields(Config):
        left_out = LEFT_OUT.get(path, {})
        missing = choices(kind) - {value for key, value in used if key == path} - set(left_out)
        assert not missing, f"{path}: no config has {missing}"


def test_every_key_has_another_value_than_its_default_in_a_config(configs):
    used = [leaf for config in configs.values() for leaf in values(config)]
    for path, _, default in fields(Config):
        if path not in LEFT_OUT and not path.endswith(NETWORK):
            assert any(key == path and value != default for key, value in used), f"{path}: is always {default!r}"


def test_every_level_of_sharing_is_in_a_config(configs):
    levels = {level for config in configs.values() for rule in config.sharing.rules for level in rule.values()}
    assert levels == {"all", "group", "group.2", "task", "client", "fixed"}


def test_workers_stacks_and_families_of_encoders_are_in_a_config(configs):
    assert {config.compute.workers for config in configs.values()} >= {0, 1, 2}
    assert {config.compute.stack for config in configs.values()} >= {0, 3}
    encoders = {Path(config.model.server_model).name for config in configs.values()}
    assert encoders >= {"bert", "albert", "distilbert", "modernbert", "tiny"}
