"""What stays at a client between rounds: personal values, the optimizer's state, and fixed values by digest.

States are stored per round, the last two of them: a client that is one round ahead of a resumed server
steps back to the round the server names. When the plan has changed since, a state moves as the server's values do. Only
the new plan is known here. A key that this plan gives to nobody is from before: a value that was split leaves its state
to each of its copies, and one that was merged gets the mean of those that went into it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fedmtl.errors import FedmtlError, PolicyError
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.sharing.extra import FILTER_PREFIX, PREFIX, Extra, slot_name, to_slots
from fedmtl.sharing.keys import Key, Weights, owner_task, weights_sha256
from fedmtl.sharing.plan import SharingPlan, mean_value, scope_tasks

DIGEST = re.compile(r"[0-9a-f]{16}")
# What slots were called before filters had names.
RENAMED = {slot: slot_name("error_feedback", slot, FILTER_PREFIX) for slot in ("residual", "residual_rows")}


def fixed_digest(key: Key, value: Tensor) -> str:
    return weights_sha256({key: value})[:16]


def load_state(folder: Path, state_round: int) -> dict[str, Weights]:
    """The slots saved for that round; none where the client starts anew (round 0) or never had anything to keep.

    A client that keeps states, but not that one, is an error: with another round's the weights would differ in silence.
    """
    if state_round == 0:
        return {}
    path = _state_path(folder, state_round)
    if path.exists():
        return {RENAMED.get(slot, slot): values for slot, values in load_tensors(path).items()}
    others = saved_rounds(folder)
    if others:
        raise FedmtlError(
            f"this client keeps its state of {_spell(others)}, and the server goes on after round {state_round}; put"
            f" back {path.name}, or start a new run"
        )
    return {}


def saved_rounds(folder: Path) -> list[int]:
    """The rounds whose state a client has."""
    return sorted(_round_of(path) for path in folder.glob("round-*.safetensors"))


def _spell(rounds: list[int]) -> str:
    return f"round{'s' if len(rounds) > 1 else ''} {' and '.join(map(str, rounds))}"


def save_state(folder: Path, round_number: int, slots: Mapping[str, Mapping[Key, Tensor]], before: int) -> None:
    """Save this round's slots; keep those of `before`, the last round the server accepted, and drop older ones."""
    if not any(slots.values()):
        return
    if before and not _state_path(folder, before).exists():
        # It had nothing to keep then: said in a file, or that state would seem to be lost.
        save_tensors(_state_path(folder, before), {})
    save_tensors(_state_path(folder, round_number), slots)
    for path in folder.glob("round-*.safetensors"):
        if _round_of(path) not in (round_number, before):
            path.unlink(missing_ok=True)


class InitialValues:
    """What a site's model starts with, by canonical name; digests are made when they are first needed."""

    def __init__(self, values: Weights) -> None:
        self._values = values
        self._digests: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._values[Key("", name)]

    def fixed(self, name: str, digest: str) -> Tensor | None:
        """The value, if that is its digest as a fixed one."""
        if Key("", name) not in self._values:
            return None
        if name not in self._digests:
            self._digests[name] = fixed_digest(Key("fixed", name), self[name])
        return self[name] if self._digests[name] == digest else None


def remember_fixed(folder: Path, weights: Weights, digests: Mapping[str, str], initial: InitialValues) -> Weights:
    """All fixed values of a job: as the model started, as sent, which are stored by digest, or from that store.

    Raises KeyError with the name of a value that is in none of them. A digest becomes a file's name: whatever is not
    one, or not that of the value that came with it, is a PolicyError.
    """
    values: Weights = {}
    for name, digest in digests.items():
        key = Key("fixed", name)
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise PolicyError("the job names a fixed value by what is no digest").coded("job_weights")
        path = folder / f"{digest}.safetensors"
        initial_value = initial.fixed(name, digest)
        if initial_value is not None:
            values[key] = initial_value
        elif key in weights:
            values[key] = weights[key]
            if not path.exists():
                if fixed_digest(key, weights[key]) != digest:
                    raise PolicyError(f"the fixed value {name} is not that of its digest").coded("job_weights")
                save_tensors(path, {"fixed": {key: weights[key]}})
        elif path.exists():
            values[key] = load_tensors(path)["fixed"][key]
        else:
            raise KeyError(name)
    return values


def extra_slots(stored: Mapping[str, Extra], prefix: str = PREFIX) -> dict[str, Mapping[Key, Tensor]]:
    """What methods and filters store at a client as slots of its state; they store tensors, not plain values."""
    for name, extra in stored.items():
        if extra.values:
            raise TypeError(f"{name} stores plain values at a client, whose state is of tensors only")
    return to_slots(stored, prefix)


def _state_path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:04d}.safetensors"


def _round_of(path: Path) -> int:
    match = re.search(r"round-(\d+)", path.name)
    return int(match[1]) if match else -1


def follow_plan(
    slots: Mapping[str, Weights], plan: SharingPlan, tasks: Sequence[str], client: str
) -> dict[str, Weights]:
    """The slots of client state under this plan's keys. What a task that rests would have got is dropped.

    So is what belongs to a value that is fixed now.
    """
    return {slot: _follow(values, plan, tasks, client) for slot, values in slots.items()}


def _follow(values: Weights, plan: SharingPlan, tasks: Sequence[str], client: str) -> Weights:
    current = {key: value for key, value in values.items() if _is_current(key, plan, client)}
    old: dict[str, list[Key]] = {}
    for key in values:
        if key not in current:
            old.setdefault(key.name, []).append(key)
    for name, keys in old.items():
        owners = [task for task in tasks if owner_task(name) in (None, task)]
        for target in dict.fromkeys(plan.key(name, task, client) for task in owners):
            users = [task for task in owners if plan.key(name, task, client) == target]
            origins = [values[key] for key in keys if scope_tasks(plan, key.scope, users)]
            if target in current or target.scope == "fixed" or not origins:
                continue
            if len({origin.shape for origin in origins}) > 1:
                continue
            mean = mean_value(origins)
            # Row numbers of two tables have no mean.
            if mean.dtype == origins[0].dtype:
                current[target] = mean
    return current


def _is_current(key: Key, plan: SharingPlan, client: str) -> bool:
    """Whether the plan still gives this key to some task."""
    kind, _, rest = key.scope.partition(":")
    if kind == "task":
        return plan.key(key.name, rest, client) == key
    if kind == "group":
        members = [task for depth in plan.groups for task, path in depth.items() if path == rest]
        return any(plan.key(key.name, task, client) == key for task in members)
    return plan.key(key.name, "", client) == key
