"""What a client of a stack keeps of its optimizer between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmtl.model.keys import Key, owner_task
from fedmtl.training.optimizer import STEP, Slots

Named = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Kept:
    """By slot and canonical name; `age` is how many steps the encoder has made, `head_ages` each task's head."""

    slots: Named
    age: int
    head_ages: Mapping[str, int]


NOTHING_KEPT = Kept({}, 0, {})


def open_kept(slots: Slots, keys: Mapping[str, Key], trained: Iterable[str]) -> Kept | None:
    """What `FlatOptimizer.state` gave; None where the encoder's values made different numbers of steps."""
    steps = slots.get(STEP, {})
    ages = {name: int(steps[keys[name]]) if keys[name] in steps else 0 for name in trained}
    of_encoder = {age for name, age in ages.items() if owner_task(name) is None}
    if len(of_encoder) > 1:
        return None
    heads = {task: age for name, age in ages.items() if (task := owner_task(name)) is not None}
    named = {slot: {name: own[key] for name, key in keys.items() if key in own} for slot, own in slots.items()}
    return Kept(named, max(of_encoder, default=0), heads)


def close_kept(kept: Kept, slots: Named, keys: Mapping[str, Key], steps: Mapping[str, int], optimizer: str) -> Slots:
    """What `FlatOptimizer.state` would give after so many more steps of each task."""
    ages: dict[str | None, int] = {None: kept.age + sum(steps.values())}
    ages |= {task: kept.head_ages.get(task, 0) + more for task, more in steps.items()}
    moved = {name: age for name in next(iter(slots.values()), {}) if (age := ages.get(owner_task(name), 0))}
    found: Slots = {slot: {keys[name]: own[name] for name in moved} for slot, own in slots.items()}
    if optimizer == "adamw":
        found[STEP] = {keys[name]: torch.tensor(float(age)) for name, age in moved.items()}
    return {slot: own for slot, own in found.items() if own}
