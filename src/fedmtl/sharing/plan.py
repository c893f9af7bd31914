"""The sharing plan: for every parameter, who shares its value.

A value's key is its parameter's canonical name together with the scope that shares it. Of a token table a client trains
only the rows that its texts use: rows without a gradient do not move, and token tables are never weight-decayed, so a
missing row is a zero delta and slicing changes no average. What a capability adds to a state, a job, an update or a
client's saved state is an `Extra`: the wire format, checkpoints and client states write it without knowing whose it is,
as plain values, and as tensors by slot and key, which are cut, moved and merged as weights under the same keys are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedmtl.config import Config, SharingConfig
from fedmtl.config.sharing import group_depth
from fedmtl.errors import ConfigError

HEADS = "heads."
LOG_VARIANCE = ".log_variance"
ADAPTERS = "adapters."


class Key(NamedTuple):
    """The key of a value: the name of its parameter, and the scope of those who share it.

    `scope` is `all`, `group:<path>`, `task:<task>`, `client:<client>` or `fixed`.
    """

    scope: str
    name: str


Weights = dict[Key, Tensor]


def is_personal(key: Key) -> bool:
    """Whether the value stays at its client."""
    return key.scope.startswith("client:")


def owner_task(name: str) -> str | None:
    """The task that a parameter of a head or of adapters belongs to; None for the encoder's."""
    return name.split(".", 2)[1] if name.startswith((HEADS, ADAPTERS)) else None


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: `encoder.layer.3`, `embeddings`, `heads.sst2`, `adapters.sst2`."""
    if owner_task(name) is not None:
        return ".".join(name.split(".", 2)[:2])
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.split(".", 1)[0]


def weights_sha256(weights: Weights) -> str:
    """A digest of (scope, name, dtype, shape, little-endian bytes), sorted, without what stays at clients."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        if is_personal(key):
            continue
        tensor = weights[key].detach().cpu().contiguous()
        digest.update(f"{key.scope}\0{key.name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Encoders of RoBERTa's kind count positions from the padding id, so low rows keep their index.
NUM_LOW_ROWS = 8

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]


def used_rows(token_ids: Iterable[np.ndarray], pad_id: int) -> Rows:
    """The sorted token rows that some texts use, with the padding row and the lowest rows."""
    parts = [np.unique(ids) for ids in token_ids]
    return np.unique(np.concatenate([*parts, np.arange(NUM_LOW_ROWS), [pad_id]])).astype(np.int64)


def compact_ids(rows: Rows, vocabulary_size: int) -> np.ndarray:
    """token id -> index into the compacted table; ids outside the slice point past its end."""
    index = np.full(vocabulary_size, len(rows), dtype=np.int64)
    index[rows] = np.arange(len(rows))
    return index


def take_rows(table: Tensor, rows: Rows) -> Tensor:
    return table.index_select(0, torch.from_numpy(rows).to(table.device))


@dataclass(frozen=True)
class SharingPlan:
    """Who shares the value of each parameter.

    `rules` are `(pattern, level)` pairs over parameter names, of which the first match wins. `groups` gives, for each
    depth of the tree of groups, the path of every task's group; one outside all of them shares with its clients only.
    `stopped` names tasks whose values do not move any more, those that they share with other tasks excepted.
    """

    rules: tuple[tuple[str, str], ...]
    groups: tuple[Mapping[str, str], ...] = ()
    stopped: tuple[str, ...] = ()

    @property
    def has_personal(self) -> bool:
        """Whether a rule leaves values at their clients."""
        return any(level == "client" for _, level in self.rules)

    def level(self, name: str) -> str:
        """Return the level of a parameter: all, group, group.N, task, client or fixed."""
        level = _first_match(self.rules, name)
        if level is None:
            raise ConfigError(f'sharing.rules: no rule matches the parameter `{name}`; end the list with `- "*": all`')
        return level

    def key(self, name: str, task: str, client: str) -> Key:
        """Return the key of the value that a parameter has for one task at one client."""
        level = self.level(name)
        if level in ("all", "fixed"):
            return Key(level, name)
        if level == "task":
            return Key(f"task:{task}", name)
        if level == "client":
            return Key(f"client:{client}", name)
        groups = self.groups[group_depth(level) - 1]
        return Key(f"group:{groups[task]}" if task in groups else f"task:{task}", name)

    def keys(self, names: Iterable[str], tasks: Sequence[str], client: str) -> dict[str, dict[str, Key]]:
        """Return, for each task, the key of every parameter of the encoder and of that task's head, by name."""
        names = list(names)
        return {
            task: {name: self.key(name, task, client) for name in names if owner_task(name) in (None, task)}
            for task in tasks
        }

    def trains(self, key: Key) -> bool:
        """Return whether training moves the value: it is neither fixed nor a stopped task's alone."""
        if key.scope == "fixed" or not self.stopped:
            return key.scope != "fixed"
        kind, _, rest = key.scope.partition(":")
        return not (kind == "task" and rest in self.stopped) and owner_task(key.name) not in self.stopped

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in JSON's types."""
        plain: dict[str, Any] = {
            "rules": [list(rule) for rule in self.rules],
            "groups": [dict(depth) for depth in self.groups],
        }
        return plain | ({"stopped": list(self.stopped)} if self.stopped else {})

    @staticmethod
    def from_dict(values: Any) -> SharingPlan:
        """Read a plan that `to_dict` wrote; anything else is a ConfigError, since it may come from a stranger."""
        try:
            record = PlanRecord.model_validate(values, strict=False)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = first["loc"][0] if first["loc"] and first["loc"][0] in ("rules", "groups") else "content"
            raise ConfigError(f"sharing plan: its {where} cannot be read ({first['type']})") from None
        if not record.has_its_groups:
            raise ConfigError(f"sharing plan: a rule names a depth of groups, and there are {len(record.groups)}")
        return record.to_plan()

    def with_rule(self, pattern: str, level: str) -> SharingPlan:
        """Return the plan with one more rule in front; an older one of the same pattern, which cannot win, is gone."""
        others = (rule for rule in self.rules if rule[0] != pattern)
        return replace(self, rules=((pattern, level), *others))


class PlanRecord(BaseModel):
    """A plan in a file, as `to_dict` wrote it; a level that does not exist is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rules: list[
        tuple[
            Annotated[str, Field(max_length=1000)],
            Annotated[str, Field(pattern=r"^(all|group(\.[1-9][0-9]{0,3})?|task|client|fixed)$")],
        ]
    ]
    groups: list[dict[str, str]]
    stopped: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list)

    def to_plan(self) -> SharingPlan:
        return SharingPlan(tuple(self.rules), tuple(self.groups), tuple(self.stopped))

    @property
    def has_its_groups(self) -> bool:
        """Whether every depth that a rule names is there."""
        depths = (group_depth(level) for _, level in self.rules if level.startswith("group"))
        return max(depths, default=0) <= len(self.groups)


# Called for every parameter of every job.
@lru_cache(maxsize=1 << 14)
def _first_match(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((level for pattern, level in rules if fnmatchcase(name, pattern)), None)


def scope_tasks(plan: SharingPlan, scope: str, tasks: Sequence[str]) -> list[str]:
    """The tasks, of those given, whose examples count for a value of that scope."""
    kind, _, rest = scope.partition(":")
    if kind == "task":
        return [task for task in tasks if task == rest]
    if kind == "group":
        members = {task for depth in plan.groups for task, path in depth.items() if path == rest}
        return [task for task in tasks if task in members]
    return list(tasks)


def plan_from_config(sharing: SharingConfig) -> SharingPlan:
    rules = tuple(item for rule in sharing.rules for item in rule.items())
    return SharingPlan(rules, tuple(_depths(sharing.groups)))


def mode_plan(config: Config) -> SharingPlan:
    """Who shares what in the config's mode: one task's clients only, nobody, or what `sharing` says."""
    plan = plan_from_config(config.sharing)
    fixed = tuple(rule for rule in plan.rules if rule[1] == "fixed")
    if config.mode in ("federated_single_task", "centralized_single_task"):
        return replace(plan, rules=(*fixed, ("*", "task")))
    if config.mode == "local":
        return replace(plan, rules=(*fixed, ("*", "client")))
    if config.mode == "centralized" and plan.has_personal:
        return replace(plan, rules=(*fixed, ("heads.*", "task"), ("*", "all")))
    return plan


def _depths(groups: Mapping[str, Any]) -> list[dict[str, str]]:
    """For each depth of the tree of groups, task -> path of its group."""
    depths: list[dict[str, str]] = []

    def walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, members in tree.items():
            here = (*path, name)
            while len(depths) < len(here):
                depths.append({})
            for task in _members(members):
                depths[len(here) - 1][task] = "/".join(here)
            if isinstance(members, Mapping):
                walk(members, here)

    walk(groups, ())
    return depths


def _members(members: Any) -> list[str]:
    if isinstance(members, Mapping):
        return [task for inner in members.values() for task in _members(inner)]
    return list(members)


def check_plan(plan: SharingPlan, names: Sequence[str]) -> None:
    """Raise a ConfigError for a parameter without a rule, a rule without a parameter, or a head that is shared."""
    won = [0] * len(plan.rules)
    for name in names:
        level = plan.level(name)
        won[next(number for number, (pattern, _) in enumerate(plan.rules) if fnmatchcase(name, pattern))] += 1
        if owner_task(name) is not None and (level == "all" or level.startswith("group")):
            prefix, what = (HEADS, "a head") if name.startswith(HEADS) else (ADAPTERS, "an adapter")
            raise ConfigError(
                f"sharing.rules: `{name}` is at level {level}, but {what} belongs to its task; "
                f'put `- "{prefix}*": task` (or client, or fixed) before that rule'
            )
    for (pattern, _), count in zip(plan.rules, won, strict=True):
        if count == 0:
            some = ", ".join(list(names)[:3])
            raise ConfigError(
                f"sharing.rules: `{pattern}` matches no parameter that an earlier rule left; names look like {some}"
            )


def move(
    weights: Weights, old: SharingPlan, new: SharingPlan, tasks: Sequence[str], *, partial: bool = False
) -> Weights:
    """Return the weights under another plan: a finer level copies a value, a coarser one averages.

    The mean of equal values is exact. Works on anything keyed like weights, so the server optimizer's state moves the
    same way; there may be values missing if it is `partial`. The server cannot move what is or becomes a client's
    value.
    """
    moved: Weights = {}
    for name in dict.fromkeys(key.name for key in weights):
        owners = [owner_task(name)] if owner_task(name) else tasks
        sources: dict[Key, dict[Key, None]] = {}
        for task in owners:
            assert task is not None
            sources.setdefault(new.key(name, task, ""), {})[old.key(name, task, "")] = None
        for target, origins in sources.items():
            values = [weights[origin] for origin in origins if origin in weights]
            if not values and partial:
                continue
            if not values or target.scope.startswith("client:"):
                raise ConfigError(f"sharing: `{name}` cannot move from {old.level(name)} to {new.level(name)} in a run")
            moved[target] = mean_value(values)
    return moved


def mean_value(values: Sequence[Tensor]) -> Tensor:
    """The mean of some values, to the last bit theirs where they are equal; never one of them itself."""
    if all(torch.equal(values[0], value) for value in values[1:]):
        return values[0].clone()
    return sum(values[1:], values[0]) / len(values)


Slots = Mapping[str, Mapping[Key, Tensor]]


@dataclass(frozen=True)
class Extra:
    """Plain values, as JSON has them, and tensors by slot and key; one per capability, under its name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Slots = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values) or any(self.tensors.values())

    def slot(self, name: str) -> Mapping[Key, Tensor]:
        """The tensors of a slot; none where there is no such slot."""
        return self.tensors.get(name, {})

    def changed(self, change: Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]) -> Extra:
        """The same values, and what `change` makes of the tensors of every slot."""
        return Extra(self.values, {slot: change(values) for slot, values in self.tensors.items()})


NO_EXTRA = Extra()
# In tensor files an extra's slots are called `extra.<name>/<slot>`. What filters store at a client is `filter.<...>`.
PREFIX, FILTER_PREFIX, SEPARATOR = "extra.", "filter.", "/"


def slot_name(name: str, slot: str, prefix: str = PREFIX) -> str:
    """What a capability's slot is called in a tensor file."""
    return f"{prefix}{name}{SEPARATOR}{slot}"


def to_slots(extras: Mapping[str, Extra], prefix: str = PREFIX) -> dict[str, Mapping[Key, Tensor]]:
    """The tensors of all capabilities as slots of one tensor file."""
    return {
        slot_name(name, slot, prefix): values
        for name, extra in extras.items()
        for slot, values in extra.tensors.items()
    }


def from_slots(
    slots: Slots, values: Mapping[str, Mapping[str, Any]] | None = None, prefix: str = PREFIX
) -> dict[str, Extra]:
    """The extras whose tensors `to_slots` named, with the plain values of each capability where there are any."""
    given = values or {}
    tensors: dict[str, dict[str, Mapping[Key, Tensor]]] = {name: {} for name in given}
    for slot, found in slots.items():
        if slot.startswith(prefix):
            name, _, inner = slot.removeprefix(prefix).partition(SEPARATOR)
            tensors.setdefault(name, {})[inner] = found
    return {name: Extra(given.get(name, {}), found) for name, found in tensors.items()}
