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
from same_bits import chosen, compare, idle, summarize, verdict
from same_bits_runs import WAYS, Case, Outcome, read_cases

Leaf = tuple[str, Any]

# What no config uses, and why.
LEFT_OUT = {
    "data.source": {"hub": "needs the network"},
    "tasks.*.source.scores_test": {True: "needs the network"},
    "clients.*.source.*.scores_test": {True: "needs the network"},
    "compute.device": "the bits of a GPU are not those of a CPU",
    "output": "where the runs lie, not what they come to",
    "federation.round_timeout": "a client that is too slow is no repeatable result",
    "federation.join_timeout": "as round_timeout",
    "methods": "capabilities of other packages",
    "clients.*.source.*.more_validation": "is refused: further validation sets are the server's",
    "privacy.example.sampling": "has one value",
    "wire.max_bytes": "refuses a run, and changes none",
    "energy.cpu_watts": "what is said of a run's energy, not what it comes to",
    "energy.grams_per_kwh": "as cpu_watts",
    "privacy.client.noise_at": {"clients": "is refused: the server sees more than sums"},
}
NETWORK = ("hub", "subset", "train_split", "validation_split", "more_validation_splits", "scores_test")


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


TABLE = [["round", "bytes_up", "a.accuracy"], ["0", "0", "0.5"], ["1", "90", "0.75"]]
LOSSES = [[0, "a", 0.7], [1, "a", 0.6]]
RUN = Outcome("0123456789", TABLE, LOSSES)


class Answered:
    """A side whose runs are all over."""

    def __init__(self, name: str, **outcomes: Outcome) -> None:
        self.name, self.outcomes = name, outcomes

    def outcome(self, name: str) -> Outcome:
        return self.outcomes[name]


def case(name: str = "a", **keys: Any) -> Case:
    return Case(name, "group", {}, **keys)


@pytest.mark.parametrize(
    ("there", "line"),
    [
        (RUN, ("same", "01234567  0.0 s")),
        (Outcome("0123456789", TABLE, LOSSES, seconds=9.0), ("same", "01234567  9.0 s")),
        (Outcome("abcdefghij", TABLE, LOSSES), ("DIFFERENT", "01234567 abcdefgh  weights")),
        (
            Outcome("0123456789", [*TABLE[:2], ["1", "90", "0.8"]], LOSSES),
            ("DIFFERENT", "01234567 01234567  results.csv (a.accuracy of round 1: 0.75 and 0.8)"),
        ),
        (Outcome("0123456789", TABLE[:2], LOSSES), ("DIFFERENT", "01234567 01234567  results.csv (2 and 1 rounds)")),
        (
            Outcome("0123456789", TABLE, [[0, "a", 0.7], [1, "a", 0.6000001]]),
            ("DIFFERENT", "01234567 01234567  evaluation losses"),
        ),
        (Outcome(error="error: no"), ("failed", "there: error: no")),
        (Outcome(skipped="ray is not installed"), ("skipped", "ray is not installed")),
    ],
)
def test_anything_but_seconds_that_differs_is_named(there, line):
    assert verdict(case(), RUN, there) == line


def test_a_config_that_fails_in_both_trees_fails():
    assert verdict(case(), Outcome(error="error: no"), Outcome(error="error: no"))[0] == "failed"


@pytest.mark.parametrize(("allowed", "status"), [({}, 1), ({"a": "a mended bug"}, 0)])
def test_a_difference_that_nobody_allowed_is_the_exit_status(capsys, allowed, status):
    sides = [Answered("here", a=RUN, b=RUN), Answered("there", a=Outcome("abcdefghij", TABLE, LOSSES), b=RUN)]
    cases = [case("a"), case("b", same_as="a")]
    assert summarize(cases, compare(cases, sides, allowed), sides, 1.0) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["allowed" if allowed else "DIFFERENT", "a", "01234567", "abcdefgh"]
    assert lines[0].endswith("(a mended bug)") == bool(allowed)
    # There, b does not come to the weights of a any more.
    assert lines[2] == "note (there): b should come to the weights of a, and does not"


def test_configs_that_come_to_the_same_by_chance_are_named():
    cases = [case("a"), case("b"), case("c", same_as="a")]
    assert list(idle(cases, {"a": RUN, "b": RUN, "c": RUN})) == [
        "b comes to the same as a: it does not use what it is there for"
    ]


def test_a_pattern_chooses_names_and_groups_and_what_they_need():
    cases = [case("teacher"), case("student", needs="teacher"), Case("other", "rest", {})]
    assert [each.name for each in chosen(cases, ["stud*"])] == ["teacher", "student"]
    assert [each.name for each in chosen(cases, ["rest"])] == ["other"]
    assert chosen(cases, []) == cases
