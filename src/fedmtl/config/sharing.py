"""Who shares what: rules over parameters, groups of tasks, and layers that change their level while a run goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from fedmtl.config.errors import HERE, WrongKey, did_you_mean, shown
from fedmtl.config.kinds import (
    Cosine,
    Count,
    Decay,
    Empty,
    Name,
    OneOrSeveral,
    Section,
    Whole,
    check_names,
    first_repeated,
)

LEVELS = ("all", "group", "group.N", "task", "client", "fixed")
_LEVEL = re.compile(r"all|group(\.[1-9][0-9]*)?|task|client|fixed")


class AdaptiveSharingConfig(Section):
    """Layers that split where tasks pull apart, and merge where they agree."""

    layers: Annotated[list[str] | None, OneOrSeveral] = Field(
        None,
        description="Patterns of the layers that may move, such as [encoder.layer.*, pooler]; empty is the encoder's"
        " numbered layers.",
        min_length=1,
    )
    levels: list[str] | None = Field(
        None,
        description="Levels a layer may take, of all, group, group.N and task; empty is all of them.",
        min_length=2,
    )
    split_below: Cosine = Field(
        -0.1, description="Two tasks disagree in a layer where the smoothed cosine of their updates is below this."
    )
    merge_above: Cosine = Field(0.1, description="Two tasks agree where it is above this; more than split_below.")
    patience: Count = Field(3, description="Rounds in a row that call for a move before the layer moves.")
    warmup_rounds: Whole = Field(1, description="First rounds, in which agreement is measured and no layer moves.")
    smoothing: Decay = Field(
        0.5, description="How much of the agreement of earlier rounds stays in its moving mean; 0 is the last round's."
    )

    @field_validator("levels")
    @classmethod
    def _are_levels_of_layers(cls, levels: list[str] | None) -> list[str] | None:
        for level in levels or ():
            if not _LEVEL.fullmatch(level) or level in ("client", "fixed"):
                raise WrongKey("", f"found {shown(level)}; {did_you_mean(level, ['all', 'group', 'task'])}")
        twice = first_repeated(levels or ())
        if twice is not None:
            raise WrongKey("", f"{shown(twice)} stands there twice; keep one")
        return levels

    @model_validator(mode="after")
    def _splits_below_where_it_merges(self) -> Self:
        if self.split_below >= self.merge_above:
            raise WrongKey(
                "split_below",
                f"found {self.split_below:g}, it must be less than merge_above, which is {self.merge_above:g}",
            )
        return self


class SharingConfig(Section):
    rules: list[dict[str, str]] = Field(
        default_factory=lambda: [{"heads.*": "task"}, {"*": "all"}],
        description="Ordered `pattern: level` rules over parameter names; levels: all, group, group.N, task,"
        " client, fixed.",
    )
    groups: Annotated[dict[Name, Any], Empty] = Field(
        default_factory=dict,
        description="Groups of tasks, as a tree: {pair: [qqp, stsb]} or"
        " {nlu: {pair: [qqp, stsb], single: [sst2]}}; level `group` is the outermost depth,"
        " `group.2` the next.",
    )
    adaptive: AdaptiveSharingConfig | None = Field(
        None, description="Let layers change their level while the federation runs; empty is a plan that stays."
    )

    @field_validator("rules")
    @classmethod
    def _are_one_pattern_each(cls, rules: list[dict[str, str]]) -> list[dict[str, str]]:
        for number, rule in enumerate(rules):
            if len(rule) != 1:
                raise WrongKey(f"{number}", f"has {len(rule)} patterns, a rule is one; write `- pattern: level`")
            ((pattern, level),) = rule.items()
            if not _LEVEL.fullmatch(level):
                raise WrongKey(f"{number}.{pattern}", f"found {shown(level)}; {did_you_mean(level, LEVELS)}")
        return rules

    @field_validator("groups")
    @classmethod
    def _are_a_tree(cls, groups: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, str] = {}
        for path, members in group_members(groups):
            for task in members:
                if task in found:
                    raise WrongKey(path, f"{task} is in {HERE}{found[task]} too; a task is in one group of a depth")
                found[task] = path
        return _named(groups)

    @model_validator(mode="after")
    def _has_the_groups_it_names(self) -> Self:
        depth = max((path.count(".") + 1 for path, _ in group_members(self.groups)), default=0)
        for number, rule in enumerate(self.rules):
            for pattern, level in rule.items():
                _check_depth(f"rules.{number}.{pattern}", level, depth)
        for level in (self.adaptive and self.adaptive.levels) or ():
            _check_depth("adaptive.levels", level, depth)
        return self


def group_depth(level: str) -> int:
    """1 for `group`, N for `group.N`."""
    return int(level.partition(".")[2] or 1)


def group_members(groups: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every group that lists tasks: its dotted path in the tree, and the tasks; a WrongKey for what is no tree."""
    check_names(map(str, groups), outer)
    for name, members in groups.items():
        path = f"{outer}.{name}" if outer else str(name)
        if isinstance(members, Mapping) and members:
            yield from group_members(members, path)
        elif isinstance(members, list) and members:
            for member in members:
                if isinstance(member, bool) or not isinstance(member, str | int):
                    raise WrongKey(path, f"found {shown(member)} among its tasks; write names of tasks")
            yield path, [str(member) for member in members]
        else:
            raise WrongKey(path, f"found {shown(members)}, it must be a list of tasks or groups of them")


def _named(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The same tree with texts where YAML found numbers: a group or a task may be called 1."""
    return {
        str(name): _named(members) if isinstance(members, Mapping) else [str(member) for member in members]
        for name, members in tree.items()
    }


def _check_depth(key: str, level: str, depth: int) -> None:
    if not level.startswith("group"):
        return
    if depth == 0:
        raise WrongKey(key, f"level `{level}` needs groups; name them, such as `{HERE}groups: {{pair: [a, b]}}`")
    if group_depth(level) > depth:
        raise WrongKey(key, f"found `{level}`, {HERE}groups is {depth} deep; use at most `group.{depth}`")
